"""The list of programs, and the bookkeeping around their compilation: nothing is compiled here."""

import json
from pathlib import Path

import pytest

import sweep

dump = sweep.dump

LIST = """
chips = ["tpu-v7x", "tpu-v4"]
variant_chips = ["tpu-v7x"]

[[program]]
name = "sla"
function = "sla.py:program"
family = "SLA"
options = { chunk = 128, front = true }
chip_options = { tpu-v4 = { heads_per_program = 4 } }
case = ["matmul", "m=1", "bf16"]
variants = [{ chunk = 64 }, { chunk = 128 }]
"""


def declared(folder, text):
    """The cases of a list."""
    path = folder / "list.toml"
    path.write_text(text)
    return sweep.cases(path)


def test_variants_change_some_options_of_their_program(tmp_path):
    base, on_v4, variant = declared(tmp_path, LIST)
    assert [case.name for case in (base, on_v4, variant)] == ["tpu-v7x-sla", "tpu-v4-sla", "tpu-v7x-sla-chunk=64"]
    assert dict(on_v4.options) == {"chunk": 128, "front": True, "heads_per_program": 4}
    assert dict(variant.options) == {"chunk": 64, "front": True}
    # The case of a prediction has the sizes of the program alone.
    assert variant.command("out") == [
        *("--chip", "tpu-v7x", "--out", "out", "tools/tpu/kernels/sla.py:program", "--family", "SLA"),
        *("--option", "chunk=64", "--option", "front=true"),
    ]
    assert base.command("out")[-4:] == ["--case", "matmul", "m=1", "bf16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LIST.replace("family", "famly"), "unknown key `famly`"),
        (LIST.replace('name = "sla"', ""), "`name` is missing"),
        (LIST + LIST[LIST.index("[[program]]") :], "`tpu-v7x-sla` is declared twice"),
        (LIST + "scalars = { sla = { 0 = [64] } }", "scalars, which are those of one size"),
        (LIST + "[[program", "list.toml"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, capsys, text, message):
    with pytest.raises(SystemExit) as refusal:
        declared(tmp_path, text)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_the_shipped_list_is_sound():
    cases = sweep.cases(Path(sweep.HERE) / "sweep.toml")
    assert {case.chip for case in cases} == set(dump.TOPOLOGIES)


def test_results_are_kept_sorted_and_replaced(tmp_path):
    results = sweep.Results(tmp_path)
    refused = dict.fromkeys(sweep.COLUMNS, "x") | {"name": "b"}
    results.put("c", schedule=json.dumps({"name": "c"}))
    results.put("b", refused=refused)
    results.put("a", schedule=json.dumps({"name": "a"}))
    again = sweep.Results(tmp_path)
    assert list(again.schedules) == ["a", "c"]
    assert again.refused == {"b": refused}
    again.put("b", schedule=json.dumps({"name": "b"}))
    assert [name for name in "abc" if sweep.Results(tmp_path).has(name)] == ["a", "b", "c"]
    assert sweep.Results(tmp_path).refused == {}
    again.keep({"a"})
    assert list(sweep.Results(tmp_path).schedules) == ["a"]


def test_a_digest_follows_what_is_imported(tmp_path):
    (tmp_path / "kernel.py").write_text("import json\nfrom products import dot\n")
    (tmp_path / "products.py").write_text("dot = 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    before = dump.source_digest(tmp_path / "kernel.py")
    (tmp_path / "other.py").write_text("x = 2\n")
    assert dump.source_digest(tmp_path / "kernel.py") == before
    (tmp_path / "products.py").write_text("dot = 2\n")
    assert dump.source_digest(tmp_path / "kernel.py") != before


def test_options_are_numbers_words_or_text():
    given = ["chunk=64", "bound=-1.5", "front=true", "inverse=none"]
    assert dump.options(given) == {"chunk": 64, "bound": -1.5, "front": True, "inverse": "none"}
    with pytest.raises(SystemExit):
        dump.options(["chunk"])
    with pytest.raises(SystemExit):
        dump.options(["chunk=64", "chunk=128"])


def test_a_reason_is_one_line():
    error = ValueError("too much\n  memory\n\nthe operation involved:\n%1 = add")
    assert dump.reason(error) == "ValueError: too much memory"
    assert len(dump.reason(ValueError("x" * 1000))) == dump.LONGEST_REASON
