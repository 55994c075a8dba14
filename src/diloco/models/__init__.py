"""Models the recipes train: one decoder-only transformer, dense or with a mixture of experts."""
