"""The names of everything that is refused between machines."""

from enum import StrEnum


class Code(StrEnum):
    """Why something was refused. The names are part of the protocol: logs, replies and tests use them."""

    # who
    NO_CERTIFICATE = "NO_CERTIFICATE"
    BAD_CERTIFICATE = "BAD_CERTIFICATE"
    EXPIRED = "EXPIRED"
    REVOKED = "REVOKED"
    REVOCATIONS_UNREADABLE = "REVOCATIONS_UNREADABLE"
    WRONG_ROLE = "WRONG_ROLE"
    # any message
    BAD_VERSION = "BAD_VERSION"
    MALFORMED = "MALFORMED"
    UNKNOWN_KIND = "UNKNOWN_KIND"
    TOO_LARGE = "TOO_LARGE"
    INCOMPLETE = "INCOMPLETE"
    BAD_OFFSET = "BAD_OFFSET"
    BAD_DIGEST = "BAD_DIGEST"
    BUSY = "BUSY"
    # enrolment
    NOT_ENROLLED = "NOT_ENROLLED"
    NUMBER_TAKEN = "NUMBER_TAKEN"
    OTHER_DATA = "OTHER_DATA"
    BAD_PROFILE = "BAD_PROFILE"
    WRONG_SERVER = "WRONG_SERVER"
    UNKNOWN_SERVER = "UNKNOWN_SERVER"
    OTHER_RECIPE = "OTHER_RECIPE"
    # updates
    ROUND_CLOSED = "ROUND_CLOSED"
    WRONG_ROUND = "WRONG_ROUND"
    WRONG_MODEL = "WRONG_MODEL"
    NOT_SELECTED = "NOT_SELECTED"
    DUPLICATE = "DUPLICATE"
    BAD_SAMPLES = "BAD_SAMPLES"
    BAD_PAYLOAD = "BAD_PAYLOAD"
    BAD_NAMES = "BAD_NAMES"
    BAD_FORM = "BAD_FORM"
    BAD_SHAPE = "BAD_SHAPE"
    BAD_DTYPE = "BAD_DTYPE"
    NOT_FINITE = "NOT_FINITE"
    NORM_TOO_LARGE = "NORM_TOO_LARGE"


class Refused(Exception):
    """A peer's message was refused, or ours was: `code` says why, `text` what to do about it."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text
