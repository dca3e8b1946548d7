# SPDX-License-Identifier: Apache-2.0
import pytest
from dynamo.llm.exceptions import CannotConnect, HttpError, InvalidArgument, Unknown

from dynamo_epd.contract.errors import DeadlineExceeded, InvalidMetadata, InvalidRequest, TransferError, Unavailable
from dynamo_epd.workers.faults import outcome, to_dynamo, to_handoff_error


@pytest.mark.parametrize(
    "error, kind, word",
    [
        (InvalidRequest("bad", item="image 2"), InvalidArgument, "invalid"),
        (InvalidMetadata("multimodal_lengths[1]", "is 0"), InvalidArgument, "invalid"),
        (Unavailable("no encode worker"), HttpError, "unavailable"),
        (DeadlineExceeded("late"), HttpError, "unavailable"),
        (TransferError("timeout", "late"), HttpError, "unavailable"),
        (RuntimeError("bug"), Unknown, "failed"),
        (ValueError("bug"), Unknown, "failed"),
    ],
)
def test_every_error_has_one_status(error, kind, word):
    made = to_dynamo(error, "r1")
    assert isinstance(made, kind) and outcome(error) == word
    # These take a worker out of routing: a fault of one request must never be one of them.
    assert not isinstance(made, CannotConnect)


def test_messages_reach_the_client_where_they_may():
    assert "image 2: bad" in str(to_dynamo(InvalidRequest("bad", item="image 2"), "r1"))
    assert to_dynamo(Unavailable("x"), "r1").code == 503
    assert "secret" not in str(to_dynamo(RuntimeError("secret"), "r1"))


def test_dynamos_own_exceptions_pass():
    error = InvalidArgument("mine")
    assert to_dynamo(error, "r1") is error


@pytest.mark.parametrize(
    "error, status", [(InvalidRequest("bad"), 400), (Unavailable("later"), 503), (RuntimeError("bug"), 503)]
)
def test_encode_reports_faults_inside_the_handoff(error, status):
    assert to_handoff_error(error, "r1").status == status
