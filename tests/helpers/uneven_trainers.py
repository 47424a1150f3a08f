"""Models that trainers train in uneven batches, and the same by one process on whole ones."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers.data_parallel import Rows, global_batches, words_model

GLOBAL_BATCH, NUM_SAMPLES, SEED, CLIP = 12, 43, 3, 0.05


class NamedRows(Rows):
    """As Hugging Face's models take them."""

    def __getitem__(self, index):
        words, labels = super().__getitem__(index)
        return {"words": words, "labels": labels}


class TakesSums(nn.Module):
    """Divides its loss by what a step counts, if it is told."""

    def __init__(self):
        super().__init__()
        self.layers = words_model()

    def forward(self, words, labels=None, **kwargs):
        logits, targets, number = self.layers(words).flatten(0, 1), labels.flatten(), kwargs.get("num_items_in_batch")
        if number is None:
            loss = F.cross_entropy(logits, targets)
        else:  # without what cross_entropy does to make 0 / 0 harmless
            of_tokens = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
            loss = (-of_tokens * (targets != -100)).sum() / number
        return {"loss": loss, "logits": logits.unflatten(0, labels.shape)}


class TakesMeans(TakesSums):
    """Knows nothing of steps."""

    def forward(self, words, labels=None):
        return super().forward(words, labels)


def trained_by_one_process(dataset, epochs, learning_rate=0.1):
    """The losses of global batches, and the model that they have trained."""
    model, losses = TakesMeans(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for batch in global_batches(len(dataset), GLOBAL_BATCH, seed=SEED, epochs=epochs):
        loss = model(dataset.words[batch], dataset.targets[batch])["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())
