import numpy as np
import pytest

from ptdbench.data.draws import draws


def test_matches_the_published_outputs_of_splitmix64():
    # rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64, seed 1234567
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert draws(1234567, 0, 5).tolist() == published


def test_a_stretch_is_the_same_wherever_it_is_cut():
    whole = draws(7, 0, 1000)
    np.testing.assert_array_equal(np.concatenate([draws(7, 0, 13), draws(7, 13, 1000)]), whole)
    assert draws(7, 5, 5).shape == (0,)


@pytest.mark.filterwarnings("error")
def test_large_numbers_wrap_without_a_warning():
    assert draws(2**64 - 1, 2**62, 2**62 + 3).shape == (3,)
