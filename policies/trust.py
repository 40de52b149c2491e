"""Whose snapshots may run here: the policy over signatures, and what is said of a snapshot that it refuses.

A snapshot is code that will run as root, so who can make one can do anything. A signature says who made it: Ed25519 over the
exact bytes of its manifest, which names every object by its hash. Computes no signature itself:
:mod:`restorer.storage.keyring` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, model_validator

from policies.matching import Mismatch
from policies.scalars import Section

Policy = Literal["require", "warn", "off"]
State = Literal["signed", "unsigned", "untrusted", "forged", "not checked"]
AbsolutePath = Annotated[str, Field(pattern="^/")]


class Trust(Section):
    """Whose snapshots may be restored on this host, and what may be in them."""

    policy: Policy | None = None
    """`require`: only snapshots signed by a trusted key are restored. `warn`: others are too, and said to be. `off`: nobody
    looks. Left out: `require` where a key is trusted, else `off`."""
    keys: tuple[AbsolutePath, ...] = ()
    """Public keys that are trusted: PEM files, or folders of `*.pub`. Read at every use: a key that is taken away is trusted no
    more."""
    sign_with: AbsolutePath | None = None
    """The private key (PEM, for root alone) that snapshots made here are signed with. It is trusted too."""
    secrets: Literal["allow", "refuse"] = "allow"
    """What becomes of a donor whose environment or command holds secrets: `refuse` makes no snapshot of it. One that was made is
    never pushed unencrypted."""
    secret_names: tuple[str, ...] = ()
    """Names of variables and options that are secrets here beside the known ones; `*` stands for anything."""
    not_secret: tuple[str, ...] = ()
    """Names that look like secrets and are none."""

    @property
    def demand(self) -> Policy:
        """The policy in force."""
        return self.policy or ("require" if self.keys or self.sign_with else "off")

    @model_validator(mode="after")
    def _somebody_is_trusted(self) -> Trust:
        if self.policy in ("require", "warn") and not (self.keys or self.sign_with):
            raise ValueError(
                f"policy is {self.policy!r}, but no key is trusted: name some in keys, or a key of your own in sign_with"
            )
        return self

    def is_exempt(self, name: str) -> bool:
        """``name`` is said to be no secret."""
        return any(fnmatchcase(name.upper(), pattern.upper()) for pattern in self.not_secret)


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature of a manifest, as far as the trusted keys can judge it."""

    key: str
    """The id of the key that it claims."""
    valid: bool | None
    """It is that key's, over these bytes; None: that key is not trusted, so nobody knows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the signatures of a snapshot say, and whether it may be restored."""

    state: State
    allowed: bool
    keys: tuple[str, ...] = ()
    """Ids of the keys that signed, as far as the state is about them."""
    mismatch: Mismatch | None = None
    """What is wrong and how to mend it, also where the policy allows it; None when it is signed, or nobody looked."""

    def __str__(self) -> str:
        return f"{self.state} by {', '.join(self.keys)}" if self.keys else self.state


TRUST = Trust()
"""The defaults."""
NOT_CHECKED = Verdict("not checked", True)


def judge(policy: Policy, trusted: Sequence[str], signatures: Sequence[Signature], faults: Sequence[str] = ()) -> Verdict:
    """May a snapshot with these signatures be restored?

    A trusted key's signature that does not fit the manifest is refused whatever else there is: somebody changed one of the two.
    ``warn`` forgives a missing signature, never a wrong one.

    Args:
        trusted: ids of the keys that are trusted.
        faults: why files of keys could not be used; said with a refusal, since the missing key may be in one of them.
    """
    if policy == "off":
        return NOT_CHECKED
    forged = tuple(one.key for one in signatures if one.valid is False)
    valid = tuple(one.key for one in signatures if one.valid)
    wanted = f"one by a trusted key ({', '.join(trusted) or 'there is none'}), as trust.policy {policy} wants"
    if faults:
        wanted += f" [{'; '.join(faults)}]"
    if forged:
        remedy = "the manifest or the signature was changed: remove the snapshot, and pull or make it again"
        return Verdict("forged", False, forged, Mismatch("signature", wanted, f"one that is not of {', '.join(forged)}", remedy))
    if valid:
        return Verdict("signed", True, valid)
    sign = "sign it where its maker's key is with `rewake snapshot sign`"
    if signatures:
        strangers = tuple(one.key for one in signatures)
        remedy = f"add the public key {', '.join(strangers)} to trust.keys if you know whose it is, or {sign}"
        return Verdict(
            "untrusted", policy == "warn", strangers, Mismatch("signature", wanted, f"one by {', '.join(strangers)}", remedy)
        )
    return Verdict("unsigned", policy == "warn", (), Mismatch("signature", wanted, "none", f"{sign}, or make a new one"))


def shown(verdict: Verdict) -> Mapping[str, object]:
    """A verdict as JSON has it."""
    return {"state": verdict.state, "keys": list(verdict.keys), "allowed": verdict.allowed}
