# SPDX-License-Identifier: Apache-2.0
"""Ready graphs for ``dynamo-epd serve``: ``graphs.epd:Frontend``, ``graphs.e_pd:Frontend``, ``graphs.agg:Frontend``."""
