"""Theta leaves: other software reads it with nothing of ours."""

import gc
import subprocess
import sys
import threading
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest

from diloco import export


THETA = {
    "embed": np.arange(6, dtype=np.float32).reshape(3, 2),
    "layers": [{"w.a": np.ones((2, 2), np.float32)}, {"w.a": np.zeros((2, 2), np.float32)}],
    "scale": np.float32(2.5),
}


def run_elsewhere(code, path):
    code = f"import sys\n{code}\nassert not any(m.startswith('diloco') for m in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[0]


def test_safetensors_loads_elsewhere(tmp_path):
    path = export.to_safetensors(THETA, tmp_path / "theta.safetensors")
    shown = run_elsewhere(
        "from safetensors.numpy import load_file\n"
        "t = load_file(sys.argv[1])\n"
        "print({k: (v.shape, float(v.sum())) for k, v in sorted(t.items())})",
        path,
    )
    want = {
        "embed": ((3, 2), 15.0),
        "layers.0.w.a": ((2, 2), 4.0),
        "layers.1.w.a": ((2, 2), 0.0),
        "scale": ((), 2.5),
    }
    assert shown == str(want)
    assert [p.name for p in tmp_path.iterdir()] == ["theta.safetensors"]


def test_orbax_loads_elsewhere(tmp_path):
    path = export.to_orbax(THETA, tmp_path / "theta")
    shown = run_elsewhere(
        "import orbax.checkpoint as ocp\n"
        "t = ocp.StandardCheckpointer().restore(sys.argv[1])\n"
        "print(float(t['embed'].sum()), float(t['layers']['0']['w.a'].sum()), t['scale'].shape)",
        path,
    )
    assert shown == "15.0 4.0 ()"
    with pytest.raises(ValueError, match="exists already; give another path"):
        export.to_orbax(THETA, path)


def test_a_missing_folder_is_told_by_the_path_that_was_given(tmp_path):
    with pytest.raises(OSError, match=r"no/theta\.safetensors could not be written \(No such file"):
        export.to_safetensors(THETA, tmp_path / "no" / "theta.safetensors")


def test_exports_touch_no_files_beside_them(tmp_path):
    params = {"w": np.ones(3, np.float32)}
    for name in ("theta.tmp", "theta.orbax-checkpoint-tmp"):
        (tmp_path / name).write_text("mine")
    export.to_safetensors(params, tmp_path / "theta")
    assert (tmp_path / "theta").stat().st_mode == (tmp_path / "theta.tmp").stat().st_mode
    with pytest.raises(ValueError, match="theta exists already"):
        export.to_orbax(params, tmp_path / "theta")
    (tmp_path / "theta").unlink()
    with pytest.raises(ValueError, match=r"theta\.orbax-checkpoint-tmp exists already"):
        export.to_orbax(params, tmp_path / "theta")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "theta.tmp": "mine",
        "theta.orbax-checkpoint-tmp": "mine",
    }


@pytest.mark.parametrize("write", [export.to_safetensors, export.to_orbax])
def test_no_parameter_is_lost_under_the_name_of_another(write, tmp_path):
    params = OrderedDict([(1, np.ones(2)), ("1", np.zeros(2))])
    with pytest.raises(ValueError, match="two leaves would both be named '1'"):
        write(params, tmp_path / "theta")
    with pytest.raises(ValueError, match="__metadata__"):
        export.to_safetensors({"__metadata__": np.ones(2)}, tmp_path / "theta")
    assert not any(tmp_path.iterdir())


def test_a_failed_export_leaves_what_was_there(tmp_path):
    path = export.to_safetensors({"w": jnp.ones(2)}, tmp_path / "theta.safetensors")
    before = path.read_bytes()
    with pytest.raises(Exception, match="object"):
        export.to_safetensors({"w": np.array([object()])}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("write", [export.to_safetensors, export.to_orbax])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(write, tmpfs, monkeypatch):
    # The storage library reports the failure in its threads too, and leaves coroutines unfinished.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    disk = tmpfs("size=64k")
    (disk / "theta-of-others").write_text("mine")
    params = {"w": np.random.default_rng(0).normal(size=30000)}
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\)"):
        write(params, disk / "theta*")
    assert [p.name for p in disk.iterdir()] == ["theta-of-others"]
    gc.collect()
