"""Bytes of the messages at a boundary, by its tensors' shapes."""

from zeroresize.pipeline.boundary_shapes import TensorShape, message_bytes


def test_messages_have_the_bytes_of_activations_and_of_the_gradients_that_come_back():
    words = TensorShape((4, 3), "int64", requires_grad=False)
    hidden = TensorShape((4, 3, 8), "float32", requires_grad=True)
    half = TensorShape((2, 5), "bfloat16", requires_grad=True)
    # 96 bytes go forward and none comes back; 384 each way; 20 each way beside 96 forward.
    assert message_bytes([(words,), (hidden,), (half, words), ()]) == (48.0, 384.0, 68.0, 0.0)
    assert hidden.num_bytes == hidden.example("cpu").nbytes
