"""Text is read honestly; islands see every example once, also when they are dealt again."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import held_out, island_iterators, load_corpus, unigram_entropy


S = 8


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


@pytest.fixture(scope="module")
def python():
    return load_corpus()


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Six packages of text in which every example is different."""
    root = tmp_path_factory.mktemp("numbered")
    lines = [f"{i:07d}\n" for i in range(240)]
    files = {f"p{i % 6}/{i:03d}.txt": "".join(lines[4 * i : 4 * i + 4]) for i in range(60)}
    return load_corpus(write(root, files))


def take(batches, steps):
    """Returns the examples of some steps as strings, one list an island."""
    drawn = np.stack([next(batches) for _ in range(steps)], axis=1)
    return [[example.tobytes() for example in island.reshape(-1, S + 1)] for island in drawn]


def every_example(corpus):
    number = (corpus.train.size - 1) // S
    return [corpus.train[i * S : i * S + S + 1].astype(np.int32).tobytes() for i in range(number)]


def deal(corpus, num_islands, batch_size, split="iid", **more):
    return island_iterators(
        corpus,
        num_islands=num_islands,
        batch_size=batch_size,
        sequence_length=S,
        split=split,
        **more,
    )


def test_default_corpus_is_real_text(python):
    text = python.train.tobytes()
    assert b"def " in text and b"import " in text
    assert "pydoc_data" in python.groups and "test" not in python.groups
    assert python.num_files > 500
    assert 0.02 < python.held_out.size / (python.held_out.size + python.train.size) < 0.15
    assert python.digest == load_corpus("python").digest
    assert len(held_out(python, 128, limit=16)) == 16


def test_unigram_entropy_is_that_of_the_held_out_bytes(numbered):
    corpus = numbered
    values, counts = np.unique(corpus.held_out, return_counts=True)
    share = dict(zip(values.tolist(), counts / counts.sum(), strict=True))
    literal = -np.mean([np.log(share[b]) for b in corpus.held_out.tolist()])
    assert unigram_entropy(corpus) == pytest.approx(literal)


def test_held_out_files_are_whole_and_nobody_trains_on_them(tmp_path):
    files = {f"{i:02d}.txt": f"file {i:02d} " * 3 for i in range(40)}
    corpus = load_corpus(write(tmp_path, files))
    train, kept = corpus.train.tobytes(), corpus.held_out.tobytes()
    for text in files.values():
        assert (text.encode() in train) != (text.encode() in kept)
    assert sum(text.encode() in kept for text in files.values()) == 2


def test_one_file_has_a_held_out_part_and_gz_reads_the_same(tmp_path):
    text = "".join(f"line {i}\n" for i in range(500))
    plain = load_corpus(write(tmp_path, {"a.txt": text}) / "a.txt")
    packed = load_corpus(write(tmp_path, {"a.txt.gz": gzip.compress(text.encode())}) / "a.txt.gz")
    assert plain.digest == packed.digest
    assert plain.held_out.size > len(text) / 40
    assert plain.held_out.tobytes().rstrip(b"\0") not in plain.train.tobytes()


def test_hidden_files_are_left_out(tmp_path):
    text = "some text " * 30
    corpus = load_corpus(write(tmp_path, {"a.txt": text, ".git/x": b"\xff", ".y": b"\xff"}))
    assert corpus.num_files == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no text"),
        ({"a.txt": ""}, "holds no text"),
        ({"a.txt": "short"}, "too short"),
        ({"a.txt": b"ab\xff"}, r"a.txt is not UTF-8 text \(byte 2\)"),
        ({"a.txt.gz": b"not packed"}, "cannot be read"),
        ({"a.txt.gz": gzip.compress(b"cut off" * 99)[:-9]}, "cannot be read"),
    ],
)
def test_bad_corpus_is_one_clear_sentence(tmp_path, files, message):
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(write(tmp_path, files))
    assert "\n" not in str(error.value)


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file or folder .*nowhere"):
        load_corpus(tmp_path / "nowhere")


@pytest.mark.parametrize("split", ["iid", "non-iid"])
def test_an_epoch_is_every_example_once(numbered, split):
    batches, examples = deal(numbered, 1, 1, split), every_example(numbered)
    first, second = (take(batches, len(examples))[0] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(examples)
    assert first != examples and first != second


def test_iid_islands_share_no_example_of_an_epoch(numbered):
    islands = take(deal(numbered, 3, 6), 30)
    assert len({*islands[0], *islands[1], *islands[2]}) == 3 * 30 * 2


def test_iid_global_batch_does_not_depend_on_the_islands(numbered):
    one, four = next(deal(numbered, 1, 8)), next(deal(numbered, 4, 8))
    assert four.shape == (4, 2, S + 1) and four.dtype == np.int32
    np.testing.assert_array_equal(one.reshape(8, -1), four.reshape(8, -1))


def test_non_iid_islands_own_whole_groups_of_equal_size(numbered):
    islands = [set(island) for island in take(deal(numbered, 3, 3, "non-iid"), 100)]
    assert not islands[0] & islands[1] and not islands[1] & islands[2]
    assert all(abs(len(island) - 76) <= 4 for island in islands)
    ends = numbered.group_ends
    group = {
        e: int(np.searchsorted(ends, i * S, "right")) for i, e in enumerate(every_example(numbered))
    }
    groups = [{group[e] for e in island} for island in islands]
    assert [len(g) for g in groups] == [2, 2, 2]
    assert set.union(*groups) == set(range(6))


def test_one_process_gets_its_own_island(numbered):
    whole, mine = deal(numbered, 4, 8), deal(numbered, 4, 8, islands=[2])
    for _ in range(3):
        np.testing.assert_array_equal(next(whole)[2:3], next(mine))


@pytest.mark.parametrize("split", ["iid", "non-iid"])
def test_state_is_json_and_resumes_exactly(numbered, split):
    batches = deal(numbered, 2, 4, split)
    take(batches, 70)  # into the second epoch
    state = json.loads(json.dumps(batches.get_state()))
    rest = take(batches, 5)
    resumed = deal(numbered, 2, 4, split)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert take(resumed, 5) == rest
    assert take(deal(numbered, 2, 4, split, seed=1), 1) != take(deal(numbered, 2, 4, split), 1)


@pytest.mark.parametrize("split", ["iid", "non-iid"])
@given(
    deals=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 4)), max_size=4)
)
@settings(max_examples=12, deadline=None)
def test_a_new_deal_repeats_no_example(numbered, split, deals):
    seen, state, total = [], None, 0
    for (
        num_islands,
        share,
        steps,
    ) in deals:  # at most 32 examples of a package, which has 36 or more
        batches = deal(numbered, num_islands, num_islands * share, split)
        if state is not None:
            batches.set_state(state)
        for island in take(batches, steps) if steps else []:
            seen += island
        state, total = batches.get_state(), total + num_islands * share * steps
    assert len(seen) == len(set(seen)) == total


def test_redeal_finishes_the_epoch_over_more_islands(numbered):
    batches, more = deal(numbered, 4, 4), deal(numbered, 5, 5)
    seen = [example for island in take(batches, 30) for example in island]
    more.set_state(batches.get_state())
    seen += [example for island in take(more, 23) for example in island]
    assert sorted(seen) == sorted(every_example(numbered))
    assert more.get_state() == {"deals": [[4, 4, 30], [5, 5, 23]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "random"}, "split is 'random'; use iid or non-iid"),
        ({"batch_size": 7}, "batch_size 7 is not divisible by 2 islands; use 8"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 4000}, "too short: 0 examples"),
        ({"num_islands": 7, "batch_size": 7, "split": "non-iid"}, "6 groups for 7 islands"),
        ({"islands": [2]}, "no island 2 among 2"),
    ],
)
def test_a_deal_that_cannot_be_is_refused(numbered, change, message):
    arguments = {"num_islands": 2, "batch_size": 4, "sequence_length": S} | change
    with pytest.raises(ValueError, match=message):
        island_iterators(numbered, **arguments)


def test_held_out_text_shorter_than_an_example_is_refused(numbered):
    with pytest.raises(ValueError, match="under one example of 1001"):
        held_out(numbered, 1000)
