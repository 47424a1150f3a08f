"""One hash of plain values tells them apart, and is a number that a float holds."""

from zeroresize.utils.hashing import digest, fingerprint


def test_fingerprints_are_numbers_that_a_float_holds_and_tell_texts_apart():
    numbers = [fingerprint(text) for text in ("", "a", "b", "a" * 1000)]
    assert len(set(numbers)) == 4 and all(number == int(number) < 2**52 for number in numbers)
    assert max(numbers) > 2**48
    assert fingerprint("é") == fingerprint("é".encode())


def test_digests_are_of_all_contents_in_their_order():
    assert len(digest("a")) == 16
    assert digest("ab", b"c") == digest("a", "bc") == digest(memoryview(b"abc"))
    assert len({digest(), digest("a", "b"), digest("b", "a")}) == 3
