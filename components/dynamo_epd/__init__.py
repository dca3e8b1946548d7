# SPDX-License-Identifier: Apache-2.0
"""Disaggregated multimodal encode, prefill and decode workers for NVIDIA Dynamo."""

__version__ = "0.1.0"
