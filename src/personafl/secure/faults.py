"""What can be wrong with what others say in the protocol: each has a name, and ends the part of who notices."""

from enum import StrEnum


class Fault(StrEnum):
    """Why a client or the server does not go on."""

    OUT_OF_ORDER = "OUT_OF_ORDER"  # a stage was left out, repeated or comes too early
    DUPLICATE = "DUPLICATE"  # a client says two different things in a stage
    STRANGER = "STRANGER"  # of or for somebody who is not a neighbour, or not in the round
    BAD_CERTIFICATE = "BAD_CERTIFICATE"  # not issued by the authority, ended, or of another number
    BAD_SIGNATURE = "BAD_SIGNATURE"  # also of a key of another round or try: signatures name the session
    BAD_KEY = "BAD_KEY"  # a key of another length, or one of those with which every secret is the same
    REPEATED_KEY = "REPEATED_KEY"  # two clients have one key
    SELF_LOOP = "SELF_LOOP"  # a client's own key or share comes as another's
    CHANGED_KEY = "CHANGED_KEY"  # the list has another key of a client than the one that it advertised
    BAD_SHARE = "BAD_SHARE"  # cannot be opened, or does not fit
    MISSING_SHARES = "MISSING_SHARES"  # of some neighbour there are too few
    BAD_LENGTH = "BAD_LENGTH"  # a vector of other entries
    BAD_NUMBER = "BAD_NUMBER"  # an entry or a weight beyond its bound
    TOO_FEW = "TOO_FEW"  # survivors, or signatures of them
    NOT_A_PART = "NOT_A_PART"  # the survivors are no part of those who shared their keys
    LEFT_OUT = "LEFT_OUT"  # a survivor is not in the list that it is shown
    BOTH_LISTS = "BOTH_LISTS"  # a client is to be opened as survivor and as dropped
    OTHER_SURVIVORS = "OTHER_SURVIVORS"  # neighbours were shown another list
    SECOND_SUM = "SECOND_SUM"  # a client has masked its vector in an earlier try, whose sum may be opened yet
    MALFORMED = "MALFORMED"  # not a message


class Breach(Exception):
    """The protocol was broken: `fault` says how, `text` by what."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(f"{fault}: {text}")
        self.fault, self.text = fault, text
