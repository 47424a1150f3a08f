"""``zeroresize report``: one page of a run or more, whose numbers are those of the statuses."""

import dataclasses
import json
import math
import re
from xml.etree import ElementTree

import pytest
from helpers.told_runs import RUN, at, write_runs

from zeroresize.commands import pictures
from zeroresize.commands.__main__ import main
from zeroresize.commands.report import Run, compared, runs_of
from zeroresize.status import RankStatus


@pytest.fixture
def page_of(tmp_path, capsys):
    def make(**runs):
        paths = write_runs(tmp_path, **runs)
        assert main(["report", *paths, "--out", str(tmp_path / "r.html")]) == 0
        return (tmp_path / "r.html").read_text(), capsys.readouterr().out

    return make


def texts_of(page, heading):
    """Rows of texts of the table below a heading."""
    table = page[page.index(heading) :].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in table.split("<tr>")[1:]]
    return rows[1:]


def test_it_tells_whether_balancing_paid_who_was_slow_and_what_was_decided(page_of):
    page, printed = page_of(first=RUN)
    assert "balancing saved 20 s: 50 s would have been 1 min 10 s, 40 % more" in page and "saved 20 s" in printed
    assert "60, has ended" in page
    assert texts_of(page, "Who was slow") == [["1", "15", "40", "4.00", "matrix products", "3 s"]]
    assert texts_of(page, "What was decided") == [["30", "why of 30"], ["50", "why of 50"]]
    assert texts_of(page, "Ranks at the end")[1][:4] == ["1", "100 ms", "1.00", "1.00"]


def test_its_pictures_are_sound_svg_of_which_each_has_a_title_and_nothing_comes_from_elsewhere(page_of):
    page, _ = page_of(first=RUN)
    svgs = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(svgs) == 3
    for svg in svgs:
        first = ElementTree.fromstring(svg)[0]
        assert first.tag.endswith("title") and first.text
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']*|url\((?!#)[^)]*|@import""", page)
    assert outside == [] and "<script" not in page


def test_ranks_differ_in_grey():
    svgs = pictures.of_run(RUN)
    colors = set(re.findall(r"#[0-9a-f]{6}", "".join(svgs)))
    assert colors and all(color[1:3] == color[3:5] == color[5:7] for color in colors)
    assert "stroke-dasharray" in svgs[1]


def test_of_many_ranks_those_that_were_slow_are_drawn():
    ranks = tuple(RankStatus(rank, 0.1, 0.5 + rank / 200, 1.0, 5 if rank == 7 else None) for rank in range(64))
    many = dataclasses.replace(at(10), ranks=ranks)
    assert pictures.chosen_ranks([many]) == [7, 63]
    assert "rank 7" in pictures.of_run([many, many])[2]


def test_runs_stand_side_by_side(page_of):
    page, _ = page_of(off=[dataclasses.replace(each, kind="nothing", saved_s=float("nan")) for each in RUN[:2]], on=RUN)
    first, second = texts_of(page, "zeroresize report</h1>")
    assert "off.jsonl" in first[0] and first[1] == "20" and second[1] == "60"
    assert "nothing was balanced" in page and "would have been 1 min 10 s" in page
    assert "last heard of at step 20" in page and "Step time of each run" in page


def test_runs_are_compared_by_steps_shares_and_the_scores_beside_them(tmp_path, capsys, monkeypatch):
    for name, chi, scores in (
        ("even", 1.0, {"test_accuracy": 0.756}),
        ("zero", 4.0, {"test_accuracy": 0.7, "loss": 2}),
    ):
        (tmp_path / name).mkdir()
        lines = [json.dumps(at(step, chi=chi).to_dict()) + "\n" for step in (10, 20)]
        (tmp_path / name / "status.jsonl").write_text("".join(lines))
        (tmp_path / name / "summary.json").write_text(json.dumps({**scores, "commit": "abc", "epochs": 3}))
    even, zero = runs_of([str(tmp_path)])
    headings, *rows = compared([even, zero])
    assert headings[-2:] == ["loss", "test accuracy"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "…" not in capsys.readouterr().out
    assert rows[0][:5] == ["even", "20", "100 ms", "1.00", "4.00"] and rows[0][-2:] == ["", "75.6 %"]
    assert rows[1] == ["zero", "20", "400 ms", "4.00", "1.00", "1.00", "0.00", "0 ms", "2", "70.0 %"]
    dropping = Run("dropping", [at(10, (1.0, 0.2)), at(20, (1.0, 0.4))], {})
    assert compared([even, dropping])[2][5:7] == ["0.30", "0.35"]


def test_a_rank_is_slow_for_the_reason_that_held_longest(page_of):
    rest = dataclasses.replace(RUN[3].ranks[1], cause="rest", slow_since=15)
    ranks = (RUN[3].ranks[0], rest)
    page, _ = page_of(first=[*RUN[:4], dataclasses.replace(RUN[4], ranks=ranks), RUN[5]])
    assert texts_of(page, "Who was slow")[0][4] == "matrix products"


def test_runs_of_several_starts_are_told_in_all(tmp_path, capsys, page_of):
    again = [dataclasses.replace(each, time=each.time + 9000.0) for each in RUN[1:]]
    page, _ = page_of(first=RUN[:4] + again)
    assert "balancing saved 40 s: 1 min 10 s would have been 1 min 50 s, 57 % more" in page
    assert [row[:3] for row in texts_of(page, "Who was slow")] == [["1", "15", "40"]] * 2
    assert [status.step for status in runs_of([str(tmp_path / "first.jsonl")])[0].statuses] == [10, 20, 30, 40, 50, 60]
    counted_on = [dataclasses.replace(each, saved_s=each.saved_s + 20.0) for each in again]
    assert Run("", RUN + counted_on, {}).saved_s == 40.0
    assert Run("", RUN, {}).spent_s == 50.0


def test_runs_have_names_of_their_own_wherever_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("_old", "$x_{", "<i>"):
        (tmp_path / name).mkdir()
        write_runs(tmp_path / name, status=RUN)
    assert main(["report", str(tmp_path / "_old"), "$x_{", "<i>", "<i>/status.jsonl"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:4]] == ["_old", "$x_{", "<i>"]
    page = (tmp_path / "report.html").read_text()
    assert all(f">run {name}</text>" in page for name in ("_old", "$x_{", "&lt;i&gt;")) and "<i>" not in page
    monkeypatch.chdir(tmp_path / "_old")
    assert [run.name for run in runs_of(["status.jsonl"])] == ["_old"]


def test_what_is_not_known_is_no_number():
    unknown = Run("first", [at(10, (math.nan, math.nan), step_s=math.nan)], {})
    assert compared([unknown, unknown])[1][2:7] == ["?"] * 5
    assert len(unknown.pictures) == 2  # shares are not known


def test_texts_of_a_run_are_no_html(page_of):
    page, _ = page_of(first=[dataclasses.replace(each, decided="<b>bold</b>") for each in RUN])
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page


def test_where_it_cannot_be_written_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(RUN[0].to_dict()) + "\n")
    assert main(["report", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_run_before_anything_is_known_is_a_page_too(page_of):
    page, _ = page_of(first=[dataclasses.replace(RUN[0], ranks=(), step_s=float("nan"), even_step_s=float("nan"))])
    assert "No rank was" in page
