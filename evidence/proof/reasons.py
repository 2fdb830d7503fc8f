"""Why a check did not run."""


class Blocked(RuntimeError):
    """Raised if this check cannot run because of a problem that another check reports."""


class Skipped(RuntimeError):
    """Raised if the machine lacks what the check is about. Nothing is wrong, and the proof is complete without it."""


class Unavailable(RuntimeError):
    """Raised with the reason if a wheel cannot be fetched here."""
