# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pkgutil
import subprocess
import sys

import dynamo_epd.contract


def test_the_contract_imports_nothing_heavy() -> None:
    names = [f"dynamo_epd.contract.{module.name}" for module in pkgutil.iter_modules(dynamo_epd.contract.__path__)]
    assert "dynamo_epd.contract.digest" in names
    script = f"import sys; [__import__(name) for name in {names}]; print(*sys.modules)"
    path = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {module.split(".")[0] for module in result.stdout.split()}
    assert not loaded & {"torch", "PIL", "dynamo", "nixl", "transformers", "rich", "tensorrt_llm"}
