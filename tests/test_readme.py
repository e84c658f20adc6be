"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cutfuse.epilogue import __main__ as epilogue_listing
from cutfuse.epilogue.table import op_table

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="the README is only in the source tree")
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_op_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    epilogue_listing.main()
    listing = capsys.readouterr().out
    assert all(op.path in listing and op.formula in listing for op in op_table().ops)
