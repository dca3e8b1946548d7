# SPDX-License-Identifier: Apache-2.0
"""``python -m dynamo_epd``: the same as the ``dynamo-epd`` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
