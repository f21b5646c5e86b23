"""What is said of reads that training never gave."""

import numpy as np
import pytest
import torch

from tests.helpers import CONTEXT, random_decoder
from wherelm.evaluation.measures import table
from wherelm.evaluation.untrained import CHUNK, untrained_reads
from wherelm.schemes import SCHEMES
from wherelm.schemes.patterns import Layer
from wherelm.schemes.relative import t5_bucket

TRAINED = 6
LENGTHS = np.array([3, 16, 9, 1, 16, 7, 6])


def share(lengths, *layers):
    """By hand: of all pairs in all layers, each (window, untrained(query, key))."""
    read = [
        (untrained(query, key), 1)
        for window, untrained in layers
        for length in lengths
        for query in range(length)
        for key in range(max(0, query + 1 - window), query + 1)
    ]
    return sum(bad for bad, _ in read) / len(read)


def by_position(query, key):
    return query >= TRAINED


def by_distance(query, key):
    return query - key >= TRAINED


def nowhere(query, key):
    return False


def by_bucket(query, key):
    """Of four buckets up to 12 (0, 1, 2 to 4, 5 and on) distance 3 reaches the third."""
    return query - key >= 5


@pytest.mark.parametrize(
    ("name", "options", "untrained"),
    [
        ("none", {}, nowhere),
        ("fox", {}, nowhere),
        ("sinusoidal", {}, by_position),
        ("learned", {}, by_position),
        ("rope", {}, by_distance),
        ("rope", {"p": 0.0}, nowhere),
        ("rope", {"scaling": "ntk", "factor": 2.0}, lambda q, k: q - k >= 2 * TRAINED),
        ("drope", {}, by_distance),
        ("drope", {"drop_at": 0.0}, nowhere),
        ("pope", {}, by_distance),
        ("alibi", {}, by_distance),
        ("kerple", {}, by_distance),
        ("fire", {}, by_distance),
        ("randomised", {}, nowhere),
        ("randomised", {"scheme": SCHEMES["learned"].Config()}, nowhere),
    ],
)
def test_the_share_is_of_the_pairs_that_the_scheme_reads_untrained(name, options, untrained):
    model = random_decoder(name, options, trained=TRAINED)
    found = untrained_reads(model, LENGTHS)
    assert found == pytest.approx(share(LENGTHS, (99, untrained)), abs=1e-12)
    assert (found > 0) == (untrained is not nowhere)


def test_every_scheme_reads_nothing_untrained_within_the_trained_length():
    for name in SCHEMES:
        found = untrained_reads(random_decoder(name, trained=TRAINED), LENGTHS.clip(max=TRAINED))
        assert (found, type(found)) == (0.0, float), name


def test_t5_reads_untrained_the_buckets_that_training_never_reached():
    options = {"buckets": 4, "max_distance": 12}
    assert t5_bucket(torch.tensor([1, 3, 4, 5]), 4, 12).tolist() == [1, 2, 2, 3]
    model = random_decoder("t5", options, trained=4)
    assert untrained_reads(model, LENGTHS) == pytest.approx(share(LENGTHS, (99, by_bucket)))
    # One token more reaches no new bucket, two more reach the last.
    assert untrained_reads(random_decoder("t5", options, trained=5), LENGTHS) > 0
    assert untrained_reads(random_decoder("t5", options, trained=6), LENGTHS) == 0


def test_what_a_window_hides_is_not_read():
    model = random_decoder("alibi", trained=TRAINED, window=8)
    assert untrained_reads(model, LENGTHS) == pytest.approx(share(LENGTHS, (8, by_distance)))
    assert untrained_reads(random_decoder("alibi", trained=6, window=6), LENGTHS) == 0


def test_each_layer_of_a_pattern_counts_by_its_own_scheme_and_window():
    entries = [("rope", 8), ("none", None), ("learned", None)]
    pattern = tuple(Layer(SCHEMES[name].Config(), window) for name, window in entries)
    model = random_decoder("hybrid", {"pattern": pattern}, trained=TRAINED, layers=4)
    layers = [(8, by_distance), (99, nowhere), (99, by_position), (8, by_distance)]
    assert untrained_reads(model, LENGTHS) == pytest.approx(share(LENGTHS, *layers))


def test_long_rows_are_counted_in_chunks():
    lengths = np.array([2 * CHUNK + 5, CHUNK, 3])
    model = random_decoder("kerple", trained=CHUNK)
    beyond, pairs = sum(range(CHUNK + 6)), sum(n * (n + 1) // 2 for n in lengths.tolist())
    assert untrained_reads(model, lengths) == pytest.approx(beyond / pairs)


def test_a_table_shows_untrained_reads_where_there_are_any():
    figures = {"loss": 1.0, "untrained_reads": 0.0}
    assert "untrained" not in table({"validation": figures})
    lines = table({"validation": figures, "longer": figures | {"untrained_reads": 0.25}})
    assert [line.split()[-2:] for line in lines.splitlines()[1:]] == [["0.0", "%"], ["25.0", "%"]]
    assert lines.splitlines()[0].split() == ["loss", "untrained"]


def test_the_context_is_no_bound_of_what_was_trained():
    """Rows as long as the context, of which training had none."""
    model = random_decoder("learned", trained=TRAINED)
    assert model.scheme.limit() == CONTEXT
    assert untrained_reads(model, np.array([CONTEXT])) > 0.5
