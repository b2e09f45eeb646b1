"""Where the repository and its bundled model lie."""

from __future__ import annotations

from pathlib import Path

import rotor

ROOT = Path(rotor.__file__).parent.parent
DEMO_MODEL = ROOT / "artifacts" / "demo-model"
