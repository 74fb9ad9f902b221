# SPDX-License-Identifier: BSD-3-Clause
"""`lower --calibration` and `compare`: a quantized program beside the model that it is of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from executorch_qnn.cli import main

MODELS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(1, 8))

    def forward(self, x):
        self.last.copy_(self.layer(x))
        return torch.sigmoid(self.last)


def net():
    return Net().eval(), (torch.ones(1, 8),)


def other():
    class Other(Net):
        def forward(self, x):
            return super().forward(x.sum(0, keepdim=True))

    return Other().eval(), (torch.ones(2, 8),)
"""


def test_compare_runs_a_file_beside_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], qnn_libraries: str
) -> None:
    (tmp_path / "nets.py").write_text(MODELS)
    generator = np.random.default_rng(0)
    files = [str(tmp_path / f"x{i}.npz") for i in range(3)]
    for file in files:
        np.savez(file, x=generator.standard_normal((1, 8), np.float32))
    np.savez(tmp_path / "two.npz", x=np.ones((1, 8), np.float32), y=np.ones(1))
    net, pte = f"{tmp_path}/nets.py:net", f"{tmp_path}/net.pte"
    common = ("--calibration", *files, "--qnn-libraries", qnn_libraries, "--json")
    lower = ("lower", net, "-o", pte, "--target", "SM8550", "--quantize", "8a8w")
    assert main([*lower, *common]) == 0
    capsys.readouterr()

    html = tmp_path / "net.html"
    compare = ("compare", pte, "--model", net, "--inputs", *files)
    assert main([*compare, "--html", str(html), *common]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["html_file"] == str(html)
    assert (document["target"], document["quantize"], document["calls"]) == ("SM8550", "8a8w", 3)
    assert [v["layer"] for v in document["layers"]] == ["layer", ""]
    assert [v["name"] for v in document["outputs"]] == ["forward: output 0", "state last"]
    for v in (*document["layers"], *document["outputs"]):
        assert all(v[k]["sqnr_db"] > 25 for k in ("fake_vs_eager", "delegate_vs_eager"))
    assert document["notes"] == []
    assert html.read_text().count("<svg") == 2

    for bad, code, text in (
        ([*compare, "--layers", "nodes"], 2, "is quantized (8a8w): give the --calibration"),
        ([*compare[:-3], f"step={files[0]}", *common], 2, "there is no method 'step'"),
        ([*compare[:-3], str(tmp_path / "two.npz"), *common], 1, "2 arrays, and forward has 1"),
        (["compare", net[:-4], *compare[2:], *common], 1, "is not an ExecuTorch program"),
        (["compare", f"{pte}x", *compare[2:], *common], 1, "no such file"),
        (["compare", pte, "--model", f"{net[:-3]}none", *compare[4:], *common], 2, "no function"),
    ):
        assert main(bad) == code, text
        err = capsys.readouterr().err
        assert text in err
        assert "Traceback" not in err


def test_a_file_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], qnn_libraries: str
) -> None:
    (tmp_path / "nets.py").write_text(MODELS)
    np.savez(tmp_path / "x.npz", x=np.ones((1, 8), np.float32))
    pte, libraries = f"{tmp_path}/other.pte", ("--qnn-libraries", qnn_libraries)
    assert main(["lower", f"{tmp_path}/nets.py:other", "-o", pte, *libraries]) == 0
    compare = ("compare", pte, "--model", f"{tmp_path}/nets.py:net", "--inputs")
    assert main([*compare, f"{tmp_path}/x.npz", *libraries]) == 1
    err = capsys.readouterr().err
    assert f"IncompatiblePayload: {pte} is no program of this model" in err
    assert "Traceback" not in err
