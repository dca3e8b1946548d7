# SPDX-License-Identifier: Apache-2.0
from .disagg_params import DisaggregatedParams

__all__ = ["DisaggregatedParams"]
