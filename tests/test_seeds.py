import itertools
import subprocess
import sys

import torch

from wherelm.seeds import named_seed, numpy_generator, torch_generator


def test_a_seed_is_the_same_in_every_process_and_version():
    assert named_seed(0, "data order", 3) == 191236438687103346
    program = "from wherelm.seeds import named_seed; print(named_seed(0, 'data order', 3))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(result.stdout) == named_seed(0, "data order", 3)


def test_every_seed_and_purpose_has_a_stream_of_its_own():
    purposes = [("dropout", step, part) for step in range(30) for part in range(30)]
    purposes += [("data order", epoch) for epoch in range(30)] + [("parameter", "a.weight")]
    seeds = [named_seed(seed, *purpose) for seed in range(3) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_start_afresh_and_leave_the_global_one_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (
        torch.rand(4, generator=torch_generator(0, purpose)) for purpose in ("a", "a", "b")
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_numpy_generators_start_afresh():
    draws = [numpy_generator(seed, "data order", 1).random(4).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_importing_seeds_loads_no_heavy_library():
    program = "import sys, wherelm.seeds; print('torch' in sys.modules or 'numpy' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "False"


def test_purposes_of_several_words_do_not_run_together():
    words = [("a", "b"), ("ab",), ("a", "b", ""), ("", "a", "b"), ("b", "a")]
    for first, second in itertools.combinations(words, 2):
        assert named_seed(0, *first) != named_seed(0, *second)
