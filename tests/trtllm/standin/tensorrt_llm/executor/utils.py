# SPDX-License-Identifier: Apache-2.0
class RequestError(RuntimeError):
    """One request failed; the engine lives on."""
