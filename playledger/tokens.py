"""Control tokens: who may come in over HTTP, read from files, kept as hashes.

`tokens_file` has a line `NAME SHA256` for each token and `#` begins a comment, so it holds no
secret; the hash is that of `printf %s "$TOKEN" | sha256sum`.  `token_file` holds one token itself.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Final

from ledger.ids import quote
from playledger.settings import SettingInvalid, Settings, read_text

TOKEN_MIN: Final = 16


def read_tokens(settings: Settings) -> dict[str, str]:
    """Returns the SHA-256 (hex) of each control token, by name; raises SettingInvalid."""
    found: dict[str, str] = {}
    if settings.tokens_file is not None:
        path = Path(settings.tokens_file)
        for number, line in enumerate(read_text(path, "tokens_file").splitlines(), 1):
            parts = line.split("#", 1)[0].split()
            if not parts:
                continue
            if len(parts) != 2 or not re.fullmatch(r"[0-9a-f]{64}", parts[1]):
                raise SettingInvalid(
                    f"{path}:{number} is not a name and the SHA-256 of a token",
                    hint="""NAME HASH, the hash by: printf %s "$TOKEN" | sha256sum""",
                )
            if parts[0] in found:
                raise SettingInvalid(
                    f"{path}:{number} names {quote(parts[0])} a second time", hint="keep one"
                )
            found[parts[0]] = parts[1]
    if settings.token_file is not None:
        token = read_text(Path(settings.token_file), "token_file").strip()
        if len(token) < TOKEN_MIN:
            raise SettingInvalid(
                f"{settings.token_file} holds {len(token)} characters, a token has at least "
                f"{TOKEN_MIN}",
                hint=f"openssl rand -hex 32 > {settings.token_file}",
            )
        found["token_file"] = sha256(token.encode()).hexdigest()
    return found
