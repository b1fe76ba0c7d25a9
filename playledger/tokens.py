"""Control tokens: who may come in over HTTP and as what, read from files, kept as hashes.

`tokens_file` has a line `NAME SHA256 ROLE [ORG]` for each token and `#` begins a comment, so it
holds no secret; the hash is that of `printf %s "$TOKEN" | sha256sum`.  A token with an ORG sees and
touches the runs of that organisation alone.  `token_file` holds one token itself, an admin's.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, get_args

from msgspec import Struct

from ledger.ids import check_key, quote
from playledger.settings import SettingInvalid, Settings, read_text

TOKEN_MIN: Final = 16

Role = Literal["read", "operate", "admin"]
"""What a token may do; each may what the ones before it may."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)


class ControlToken(Struct, frozen=True):
    """One token: the SHA-256 (hex) of it, its role, and the organisation it is confined to."""

    digest: str
    role: Role = "admin"
    org: str | None = None


def read_tokens(settings: Settings) -> dict[str, ControlToken]:
    """Returns each control token by its name; raises SettingInvalid, naming file and line."""
    found: dict[str, ControlToken] = {}
    if settings.tokens_file is not None:
        path = Path(settings.tokens_file)
        for number, line in enumerate(read_text(path, "tokens_file").splitlines(), 1):
            parts = line.split("#", 1)[0].split()
            if not parts:
                continue
            if parts[0] in found:
                raise SettingInvalid(
                    f"{path}:{number} names {quote(parts[0])} a second time", hint="keep one"
                )
            found[parts[0]] = _token(f"{path}:{number}", parts)
    if settings.token_file is not None:
        token = read_text(Path(settings.token_file), "token_file").strip()
        if len(token) < TOKEN_MIN:
            raise SettingInvalid(
                f"{settings.token_file} holds {len(token)} characters, a token has at least "
                f"{TOKEN_MIN}",
                hint=f"openssl rand -hex 32 > {settings.token_file}",
            )
        found["token_file"] = ControlToken(sha256(token.encode()).hexdigest())
    return found


def _token(place: str, parts: list[str]) -> ControlToken:
    """Reads one line; what may be a secret is not repeated, and an unknown role lets nobody in."""
    if len(parts) < 2 or not re.fullmatch(r"[0-9a-f]{64}", parts[1]):
        raise SettingInvalid(
            f"{place} is not a name, the SHA-256 of a token and a role",
            hint="""NAME HASH ROLE [ORG], the hash by: printf %s "$TOKEN" | sha256sum""",
        )
    if len(parts) == 2:
        raise SettingInvalid(
            f"{place} gives {quote(parts[0])} no role", hint=f"add one of {', '.join(ROLES)}"
        )
    role = next((known for known in ROLES if known == parts[2]), None)
    if role is None:
        raise SettingInvalid(
            f"{place} gives {quote(parts[0])} the role {quote(parts[2])}, which is none",
            hint=f"one of {', '.join(ROLES)}",
        )
    if len(parts) > 4:
        raise SettingInvalid(
            f"{place} has {len(parts)} words, a token has at most 4",
            hint="NAME HASH ROLE [ORG]; an organisation's name has no space here",
        )
    org = check_key(parts[3], "organisation") if len(parts) == 4 else None
    return ControlToken(parts[1], role, org)
