"""What is known of the tensors between two layers: bytes of their messages, and the text that tells it."""

import torch

from zeroresize.runtime.boundaries import TensorShape, from_text, message_bytes, to_text

WORDS = TensorShape((4, 3), torch.int64, requires_grad=False)
HIDDEN = TensorShape((4, 3, 8), torch.float32)
HALF = TensorShape((2, 5), torch.bfloat16)


def test_messages_have_the_bytes_of_activations_and_of_the_gradients_that_come_back():
    # 96 bytes go forward and none comes back; 384 each way; 20 each way beside 96 forward.
    assert [message_bytes(one) for one in ((WORDS,), (HIDDEN,), (HALF, WORDS), ())] == [48.0, 384.0, 68.0, 0.0]
    assert HIDDEN.num_bytes == HIDDEN.empty(torch.device("cpu")).nbytes


def test_a_text_tells_boundaries():
    boundaries = [(WORDS, HALF), (HIDDEN,), ()]
    assert from_text(to_text(boundaries)) == boundaries
