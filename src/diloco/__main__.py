"""`python -m diloco` is the command `diloco`."""

from diloco.cli import main


if __name__ == "__main__":
    main()
