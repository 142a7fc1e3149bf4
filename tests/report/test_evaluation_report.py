"""The report of an evaluation says what the record says, for every kind of record."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report.evaluations import (
    Attacked,
    by_hand,
    hand_report,
    of_values,
    section,
    tables,
)

from otad.evaluate.records import CERTIFICATE_CHECK, FAIL, Evaluation, Flag
from otad.report import evaluation_report as module
from otad.report import plots
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import ReportContext, spread
from otad.report.formatting import scientific
from otad.report.page import Picture, Pictures, Section, Text
from otad.report.verdict import verdict
from otad.scores import wilson_interval

SLUGS = [
    "threat", "curves", "flags", "attacks", "clean", "certificate", "solver", "attack-cost",
    "repeat",
]  # fmt: skip


def with_radii(radius: tuple[float, ...]) -> Evaluation:
    certificate = by_hand().certificate
    assert certificate is not None
    return replace(by_hand(), certificate=replace(certificate, radius=radius))


def test_the_headline_is_worst_case_proved_clean_and_flags() -> None:
    worst, proved, clean, flags = hand_report().numbers
    low, high = wilson_interval(6, 10)
    assert worst.value == "60.0%"
    assert worst.remark.startswith("at eps = 1, n = 10")
    assert worst.remark.endswith(f"{100 * low:.1f} to {100 * high:.1f}%")
    assert (proved.value, clean.value) == ("40.0%", "90.0%")
    assert (flags.value, flags.remark, flags.alarm) == ("1 of 2", "1 pass, 1 not run", True)
    without = module.headline(replace(by_hand(), flags=by_hand().flags[:1]))[-1]
    assert (without.value, without.alarm) == ("0 of 1", False)


def beside(evaluation: Evaluation, **changes: Any) -> Evaluation:
    """With an undefended network that only the last two attacks break."""
    alone = replace(
        evaluation, attacks=evaluation.attacks[-2:], certificate=None, flags=(), solver=None,
        model={"kind": "net"},
    )  # fmt: skip
    return replace(evaluation, undefended=alone, **changes)


@pytest.mark.parametrize(
    ("evaluation", "first", "second"),
    [
        (
            beside(by_hand()),
            "Of 10 test digits, 60% are still classified correctly under every attack we ran "
            "within l2 1; the undefended network keeps 90%.",
            "40% are proved to stay right under any attack of this size, but 1 of 2 checks of the "
            "attacks fails: read it first.",
        ),
        (
            replace(by_hand(), certificate=None, flags=by_hand().flags[:1]),
            "within l2 1.",
            "Nothing is proved, and the strength of the attacks was not checked.",
        ),
        (
            replace(by_hand(), undefended_reason="there is none", flags=by_hand().flags[::2] * 2),
            "within l2 1; there is none.",
            "and none of the 2 checks of the attacks fails; 2 were not run.",
        ),
        (
            replace(by_hand(), certificate=None, flags=by_hand().flags[:2]),
            "within l2 1.",
            "Nothing is proved, and 1 of 2 checks of the attacks fails: read it first.",
        ),
        (replace(by_hand(), model={"kind": "net"}), "; this network has no defense.", ""),
        (
            replace(by_hand(), flags=(Flag(CERTIFICATE_CHECK, FAIL, "", "", ""),)),
            "Of 10",
            "trust none of these numbers",
        ),
        (
            beside(of_values()),
            "On 4 test digits, the attacks we ran within linf 1 drive the mean error from 1 to "
            "1.5; the mean error of the undefended network rises from 1 to 1.38.",
            "No attack of this size can drive the mean error above 3 (proved)",
        ),
        (replace(by_hand(), attacks=()), "No attack was run", "40% are proved"),
    ],
)
def test_the_verdict_says_what_is_gained_and_proved(
    evaluation: Evaluation, first: str, second: str
) -> None:
    opening, trust = verdict(evaluation, "test digits")
    assert first in opening
    assert second in trust


def test_the_verdict_opens_the_report() -> None:
    report = hand_report()
    assert list(report.verdict) == verdict(by_hand())
    for content in (report.html(), report.markdown()):
        places = [content.index(it) for it in (*report.verdict, report.numbers[0].name)]
        assert places == sorted(places)


@pytest.mark.parametrize("make", [by_hand, of_values])
def test_the_undefended_network_is_shown_beside_the_model(make: Callable[[], Evaluation]) -> None:
    evaluation = beside(make())
    alone, report = evaluation.undefended, evaluation_report(evaluation)
    assert alone is not None
    is_classifier = evaluation.task == "classification"
    values = [alone.worst_case(eps).value for eps in evaluation.eps] if is_classifier else [
        statistics.fmean(alone.worst_errors(eps)) for eps in (0.0, *evaluation.eps)
    ]  # fmt: skip
    (curve,) = tables(report, "curves")
    column = list(curve.columns).index("undefended" if is_classifier else "undefended mean")
    assert [float(row[column].rstrip("%")) for row in curve.rows] == pytest.approx(values, rel=1e-3)
    second = report.numbers[1]
    assert (second.name, second.plain) == ("undefended network", True)
    assert second.value in {row[column] for row in curve.rows}
    draw = plots.accuracy_curves if is_classifier else plots.error_curves
    lines = {line.get_label(): line for line in draw(evaluation).axes[0].lines}
    eps, drawn = lines["undefended network"].get_data()
    for size, value in zip((0.0, *evaluation.eps), values, strict=False):
        if size in eps and not is_classifier:
            assert drawn[list(eps).index(size)] == pytest.approx(value)
    assert drawn[-1] == pytest.approx(values[-1])
    assert [it for it in tables(report, "attacks") if it.summary == "The undefended network"]


@pytest.mark.usefixtures("brief_reports")
def test_images_of_eps_are_moved_that_far(attacked: Attacked) -> None:
    pictures = section(attacked.report, "threat").blocks[-1]
    assert isinstance(pictures, Pictures)
    assert pictures.columns == ["example", "attacked", "random", "random"]
    context = ReportContext(attacked.evaluation, **attacked.known)
    adversarial, x = context.adversarial, context.x
    assert adversarial is not None
    ball = context.ball(x.shape[1:])
    clean = x[adversarial.rows]
    chosen = spread(ball.distance(adversarial.inputs, clean), 1.0, 3)
    with torch.no_grad():
        answers = attacked.known["model"](clean[chosen]).argmax(1).tolist()
    uris = [plots.pixels_uri(clean[place], (0.0, 1.0)) for place in chosen]
    expected = [(uri, f"answer: {it}") for uri, it in zip(uris, answers, strict=True)]
    assert [row[0] for row in pictures.rows] == expected
    assert len({uri for row in pictures.rows for uri, _ in row}) == 12
    bare = evaluation_report(attacked.evaluation, x=x)  # no attack and no model is known
    (alone,) = section(bare, "threat").blocks[1:]
    assert alone.columns == ["example", "random", "random"]
    assert {caption for row in alone.rows for _, caption in row} == {""}
    assert len(section(evaluation_report(attacked.evaluation), "threat").blocks) == 1


@pytest.mark.parametrize(
    ("free", "size", "changed"),
    [
        ([0, 3], "0.707 for each of 2 features", "cannot switch"),
        ([0, 1, 2], "1 for each of 1 features", "switch as a whole, up to 1 of them"),
        ([], None, "cannot switch"),
    ],
)
def test_only_features_that_may_change_share_eps(free, size, changed) -> None:
    mutable = [column in free for column in range(6)]
    known = by_hand()
    threat = known.threat | {"mutable": mutable, "groups": [[1, 2]], "scale": [2.0] * 6}
    x = torch.zeros(10, 6)
    x[:, 1] = 1.0
    report = evaluation_report(replace(known, threat=threat), x=x)
    facts = section(report, "threat").blocks[0].facts
    assert facts["headline eps"] == (f"1, that is {size} if spread evenly" if size else "1")
    expected = f"{len(free)} of 6 features; 1 categories (2 columns) {changed}"
    assert facts["may change"] == expected


def test_bars_of_eps_are_the_changes_of_features() -> None:
    changes = {
        "attacked": torch.tensor([[0.1, -0.4, 0.3]]),
        "random": torch.tensor([[0.2, 0, -0.1]]),
    }
    (panel,) = plots.change_bars(changes, ("acid", "sugar", "salt"), 2).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["sugar", "salt"]
    widths = [bar.get_width() for bar in panel.patches]
    np.testing.assert_allclose(widths, [-0.4, 0.3, 0.0, -0.1], atol=1e-7)


def test_tables_count_an_attack_with_those_before_it() -> None:
    report = hand_report()
    assert [it.slug for it in report.sections] == SLUGS
    at_headline, others, missing = tables(report, "attacks")
    # Row 0 breaks at 0.4, row 1 at 0.8 and row 9 is always wrong: 7 remain; pgd then breaks row 2.
    assert list(at_headline.rows) == [
        ("straight", "adaptive", "1", "8", "1", "70.0%", "12", "3", "1.5"),
        ("pgd", "white-box", "1", "7", "1", "60.0%", "12", "3", "1.5"),
        ("worst case", "", "1", "10", "4", "60.0%", "", "", "3.0"),
    ]
    assert [(row[0], row[2], row[5]) for row in others.rows] == [
        ("straight", "0.5", "80.0%"), ("pgd", "0.5", "80.0%"),
        ("straight", "2", "40.0%"), ("pgd", "2", "30.0%"),
    ]  # fmt: skip
    assert others.summary
    assert missing.rows[0][0] == "square"
    (curve,) = tables(report, "curves")
    assert [(row[0], row[1], row[3]) for row in curve.rows] == [
        ("0.5", "80.0%", "50.0%"), ("1", "60.0%", "40.0%"), ("2", "30.0%", "0.0%"),
    ]  # fmt: skip
    assert curve.strong == "1"


def test_attacks_on_all_rows_count_alone() -> None:
    first = by_hand().attacks[2]
    both = (
        replace(first, attacked=tuple(range(9)), broken=(0, 1), distances=(0.4, 0.8)),
        replace(first, attack="pgd", attacked=tuple(range(9)), broken=(1, 2), distances=(0.9, 0.9)),
    )
    evaluation = replace(by_hand(), attacks=both)
    assert plots.counted_with(evaluation) == {"straight": ["straight"], "pgd": ["pgd"]}
    alone = evaluation_report(evaluation)
    (table, _) = tables(alone, "attacks")
    assert [row[5] for row in table.rows] == ["70.0%", "70.0%", "60.0%"]
    assert table.columns[5] == "accuracy"
    for report, expected in ((alone, True), (hand_report(), False)):
        (picture,) = (it for it in section(report, "curves").blocks if isinstance(it, Picture))
        assert ("counts its attack alone" in picture.caption) == expected


def test_drawn_curves_are_the_accuracies_of_the_record() -> None:
    evaluation = by_hand()
    panel = plots.accuracy_curves(evaluation).axes[0]
    lines = {line.get_label(): line for line in panel.lines}
    for name, attacks in (("straight", ["straight"]), ("worst case", ["straight", "pgd"])):
        eps, drawn = lines[name].get_data()
        expected = [evaluation.accuracy_under(attacks, float(size)).value for size in eps]
        np.testing.assert_allclose(drawn, expected)
    eps, drawn = lines["proved"].get_data()
    scores = [evaluation.certified_accuracy(float(size)) for size in eps]
    np.testing.assert_allclose(drawn, [score.value for score in scores if score])


def test_flags_solver_and_certificate_are_reported() -> None:
    text = hand_report().html()
    assert re.findall(r'class="verdict">([A-Z ]+)<', text) == ["FAIL", "NOT RUN", "PASS"]
    for words in (
        "71 % are zero", "Attacks are blind.", "Use BPDA.", "no model was given",
        scientific(4e-8), "10.0%", "L used", "3.3",
        "hull", "a linear head", "No adversarial example was found inside",
        "seed 7", "2026-01-02T03:04:05+00:00", "steps = 20, inner.rate = 0.25",
        "gave no answer for 1 of the 10", "from 0 to 1", "Euclidean",
    ):  # fmt: skip
        assert words in text, words


def test_wrong_proofs_and_infinite_radii_are_reported(tmp_path: Path) -> None:
    wrong = with_radii((0.41, *[0.0] * 9))  # row 0 was broken at 0.4
    assert "1 adversarial examples are INSIDE" in str(
        module.certificate_section(ReportContext(wrong))
    )
    infinite = with_radii((0.1, 0.2, 0.3, 1.1, *[math.inf] * 6))
    infinite.write(tmp_path / "record.json")
    assert Evaluation.read(tmp_path / "record.json").certificate == infinite.certificate
    bars, rows = plots.radii_plots(infinite).axes
    assert bars.get_xlabel() == "certified radius, 5 more are infinite"
    assert np.isfinite([*bars.get_xlim(), *rows.get_ylim()]).all()
    assert np.isfinite(rows.lines[0].get_ydata()).all()
    _, table, _ = module.certificate_section(ReportContext(infinite)).blocks
    assert "infinite" in {row[-1] for row in table.rows}


@pytest.mark.parametrize("make", [by_hand, of_values])
def test_an_eps_of_zero_is_drawn(make: Callable[[], Evaluation]) -> None:
    known = make()
    attacks = tuple(replace(record, eps=0.0) for record in known.attacks)
    still = replace(known, eps=(0.0,), threat=known.threat | {"eps": 0.0}, attacks=attacks)
    assert "eps = 0" in evaluation_report(still).html()  # a warning of a plot would be an error


def test_the_legend_of_the_cost_covers_no_bar() -> None:
    figure = plots.seconds_bars(by_hand())
    figure.draw_without_rendering()
    (legend,) = figure.legends
    below = legend.get_window_extent().y0
    assert all(bar.get_window_extent().y1 <= below for bar in figure.axes[0].patches)


@pytest.mark.usefixtures("brief_reports")
def test_without_attacks_nothing_is_called_robust() -> None:
    bare = replace(by_hand(), attacks=(), certificate=None, flags=(), solver=None, missing={})
    report = evaluation_report(bare)
    assert report.numbers[0].value == "not attacked"
    assert report.numbers[0].alarm
    text = report.html()
    for words in ("No attack was run", "no certificate was computed", "No check was run"):
        assert words in text
    assert "solver" not in [it.slug for it in report.sections]
    assert "not attacked" in report.markdown()
    proved = replace(by_hand(), flags=(Flag(CERTIFICATE_CHECK, "PASS", "", "", ""),))
    assert "The strength of the attacks was not checked, so" in evaluation_report(proved).html()


def test_regression_reports_errors_and_bounds() -> None:
    evaluation, report = of_values(), hand_report(of_values)
    assert [number.value for number in report.numbers] == ["1.5", "3", "1", "none run"]
    (curve,) = tables(report, "curves")
    assert list(curve.rows) == [
        ("0", "1", "1.375", "2", "-"), ("1", "1.5", "3.125", "3", "3"), ("2", "4", "16", "4", "-"),
    ]  # fmt: skip
    at_headline, others = tables(report, "attacks")
    assert [row[4:6] for row in at_headline.rows] == [("1.25", "2.5"), ("1.312", "3")]
    assert [row[4:6] for row in others.rows] == [("4", "4")]
    lines = {line.get_label(): line for line in plots.error_curves(evaluation).axes[0].lines}
    np.testing.assert_allclose(lines["worst case"].get_ydata(), [1, 1.5, 4])
    np.testing.assert_allclose(lines["noise"].get_ydata(), [1, 1.375, 1.375])
    text = report.html()
    for words in ("1 of 2 features", "from 1 to 2", "unbounded", "largest change of any feature"):
        assert words in text
    assert module.headline(replace(evaluation, attacks=()))[0].value == "not attacked"


def test_abstentions_of_a_regressor_are_reported() -> None:
    """An infinite mean does not say by itself that answers are missing, nor how many."""
    evaluation = replace(of_values(), certificate=None, clean_errors=(0.5, 0.5, 1.0, math.inf))
    first, *rest = evaluation.attacks
    lost = replace(first, errors=(0.5, math.inf, 1.0, math.inf))
    silent = replace(evaluation, attacks=(lost, *rest))
    worst, clean = module.headline(silent)[:2]
    assert (worst.value, clean.value) == ("inf", "inf")
    assert worst.remark.endswith("no answer to 2 of them")
    assert clean.remark.endswith("no answer to 1 of them")
    assert plots.error_curves(silent).axes[1].get_xlabel().endswith("no answer to 2 of them")
    assert "no answer to" not in hand_report(of_values).html()


@pytest.mark.usefixtures("brief_reports")
def test_a_new_section_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def size_section(context: ReportContext) -> Section:
        return Section("size", "Size", f"n = {context.evaluation.n}", [Text("all of them")])

    monkeypatch.setattr(module, "SECTIONS", [*module.SECTIONS, size_section])
    report = evaluation_report(by_hand())
    assert section(report, "size").lead == "n = 10"
    for content in (report.html(), report.markdown()):
        assert "all of them" in content
