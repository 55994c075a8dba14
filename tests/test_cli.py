"""The command line: help at once, and every mistake is one line with the remedy and exit status 2."""

import os
import subprocess
import sys

import pytest

from diloco import cli, conf


def run(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(words))
    return stop.value.code


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_help_has_an_example(command, capsys):
    assert run(*command, "--help") == 0
    out = capsys.readouterr().out
    assert f"Example: diloco {' '.join(command)}".strip() in out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["nothing"]])
def test_help_comes_without_jax(words):
    code = (
        "import sys, time, diloco.cli\n"
        f"try: diloco.cli.main({words})\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules\n"
        "assert time.process_time() < 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["train"], "RECIPE"),
        (["train", "laptop-diloc"], "no recipes entry 'laptop-diloc'; did you mean laptop-d"),
        (
            ["train", "no/such.toml"],
            "no recipes entry 'no/such.toml'; give the path of an existing",
        ),
        (["train", "laptop-diloco", "--st", "a=1"], "Unrecognized options: --st"),
        (["train", "laptop-diloco", "--set", "train.steps"], "is not section.key=value"),
        (["train", "laptop-diloco", "--set", "train.stps=1"], "did you mean steps?"),
        (["train", "laptop-diloco", "--set", "diloco.sync_period=0"], "sync_period 0 is below 1"),
        (["train", "laptop-diloco", "--set", "train.steps=x"], "use a whole number"),
        (["train", "laptop-diloco", "--data", "no/such/text"], "no/such/text"),
        (["train", "laptop-diloco", "--data", ""], "the corpus has an empty path"),
        (["train", "laptop-diloco", "--set", f"train.seed={2**64}"], "use 0 to 4294967295"),
        (["train", "laptop-diloco", "--set", "model.vocab_size=10"], "vocab_size 10 is below 256"),
        (
            ["train", "qwen3-30b-a3b-streaming-v5p-128x2"],
            "GiB here; use the recipe laptop-twin-moe-streaming, or a machine with more memory",
        ),
        (["plan", "--gbit", "abc"], "--gbit is not of the kind FLOAT; see diloco plan"),
        (["plan", "laptop-diloco", "--pattern", "no"], "use one of strided, sequential, balanced"),
        (["train", "laptop-diloco", "--save-every", "x"], "--save-every is not of the kind INT"),
        (["report"], "no run; name at least one run directory"),
        (["report", "no/such/run"], "no/such/run is not a run directory"),
        (["recipe", "laptop-diloco", "--target", "nowhere"], "invalid choice 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("diloco: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_file_where_a_folder_is_to_be_is_one_line_with_the_remedy(capsys, tmp_path):
    (tmp_path / "run").write_text("")
    assert run("train", "laptop-diloco", "--run-dir", str(tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert err.endswith(
        "run/checkpoints could not be written (Not a directory); "
        "give another path, or make this one usable\n"
    )
    assert err.count("\n") == 1


def test_nothing_at_all_shows_the_commands_and_fails(capsys):
    assert run() == 2
    assert "train" in capsys.readouterr().out


def test_recipes_are_listed_with_their_summary(capsys):
    cli.main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == conf.names("recipes")
    assert all(line.endswith(".") for line in lines)


def test_set_is_given_once_or_more(capsys):
    words = ["--set", "a.b=1", "laptop-diloco", "--set", "e.f=3", "--data", "my text"]
    bound = cli._parse("train", words).keywords
    assert bound["recipe"] == "laptop-diloco"
    assert cli._changes(bound["set"], bound["data"]) == [
        "a.b=1",
        "e.f=3",
        'data.corpus="my text"',
    ]


def test_a_full_disk_is_one_line_and_exit_2_for_what_is_printed_too(tmp_path):
    with open("/dev/full", "w") as full:
        for words in (["recipes"], ["--help"]):
            done = subprocess.run(
                [sys.executable, "-m", "diloco", *words], stdout=full, stderr=subprocess.PIPE
            )
            assert done.returncode == 2
            assert done.stderr == (
                b"diloco: error: the output: No space left on device; make room or give another path\n"
            )


def test_a_reader_who_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "recipes"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_save_that_fails_is_one_line(tmpfs, tmp_path):
    (tmp_path / "text.txt").write_text("words and more words\n" * 2000)
    words = [
        *("model.name=tiny", "data.sequence_length=16", "train.steps=2", "train.warmup_steps=1"),
        *(
            "train.global_batch_size=4",
            "train.eval_sequences=4",
            f"data.corpus={tmp_path}/text.txt",
        ),
    ]
    disk = tmpfs("size=200k")
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "train", "laptop-diloco", "--run-dir", disk / "run"]
        + [word for change in words for word in ("--set", change)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "checkpoints/0 could not be written (No space left on device)" in done.stderr


def test_a_defect_keeps_its_traceback(monkeypatch):
    def broken(runs, out):
        return int("not a number of ours")

    monkeypatch.setattr("diloco.report.write_report", broken)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["report", "x"])


def test_python_m_diloco_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "diloco", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "diloco: error: no command 'trian'; did you mean train?\n"
