"""README's first example: short, and it runs as it stands."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

README = Path(__file__).parent.parent / "README.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


def batches():
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=drawn), torch.randn(4, 8, generator=drawn)) for _ in range(12)]


def train_whole():
    """Losses before and after the same training of the undivided model."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in batches():
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return evaluate(model)


def evaluate(model):
    return [nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in batches()]


def test_the_words_of_its_log_lines_and_tables_are_explained_where_they_come_first():
    page = README.read_text()
    explained = re.findall(r"(?m)^\| ([^|]+) \|", (README.parent / "docs" / "words.md").read_text())
    words = {word.strip() for row in explained for word in row.split(",")}
    assert {"unit", "lent", "target", "Baseline", "comparing products"} <= words
    first_link = page.index("(docs/words.md)")
    assert page.index("to compare products") < first_link < page.index("| it attaches to |")
    assert "[target](docs/words.md)" in page


def test_the_row_of_mode_off_says_until_when_to_ask_what_other_modes_would_do():
    (row,) = re.findall(r"(?m)^\| .*`balancer\.what_if\(\)`.*$", README.read_text())
    assert "not the accuracy" in row and "until `owned` changes" in row
    usage = (README.parent / "docs" / "usage.md").read_text()
    section = usage.partition("### What other modes would do\n")[2].partition("\n## ")[0]
    for needed in ("no forecast", "second update", "as much as the move there and back", "elsewhere it is an error"):
        assert needed in " ".join(section.split())


def test_the_first_example_is_short_and_says_how_its_log_lines_are_seen():
    assert "logging.basicConfig(level=logging.INFO)" in EXAMPLE and len(EXAMPLE.splitlines()) <= 15


def test_the_first_example_trains_a_model_as_without_it(run_ranks):
    def check(rank, group):
        names = {
            "model": Model(),
            "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
            "loader": batches(),
            "loss_function": nn.functional.mse_loss,
        }
        exec(compile(EXAMPLE, "README.md", "exec"), names)
        model, balancer = names["model"], names["balancer"]
        assert isinstance(balancer, zr.Balancer) and balancer.config == zr.BalanceConfig()
        assert balancer.metrics()["balance/owned_share"] == 1.0, "nothing moves before the first plan, after 20 steps"
        assert len(owned_segments(balanced_layers(model))) == 2
        torch.testing.assert_close(torch.tensor(evaluate(model)), torch.tensor(train_whole()), rtol=1e-5, atol=1e-6)

    run_ranks(check, 2)
