"""How session URLs travel and rest (SPEC 7.14, 7.15; AUDIT 5.4; INV-43, INV-44)."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey

from handlers.session_crypto import (
    TRANSPORT,
    Asked,
    EphemeralKey,
    SessionUnreadable,
    open_with_token,
    seal_for_request,
    seal_for_token,
    session_aad,
    transport_info,
)
from ledger.canonical import Json

URL = "postgresql://runner:canary-password@db.example/crm"
ASKED = Asked(run_id="run-1", request_id="5b8a0d1e")
SESSION: dict[str, Json] = {
    "expiresAt": 1_800_000_000_000,
    "limits": {"rows": 10},
    "operations": ["select", "update"],
    "playName": "enrich",
    "target": {"logicalTable": "leads", "orgId": "acme", "tableNamespace": "crm"},
}
CHANGES: list[tuple[str, Json]] = [
    ("expiresAt", 1_900_000_000_000),
    ("limits", {"rows": 11}),
    ("operations", ["delete", "select", "update"]),
    ("playName", "other"),
    ("target", {"logicalTable": "leads", "orgId": "rival", "tableNamespace": "crm"}),
    ("target", {"logicalTable": "notes", "orgId": "acme", "tableNamespace": "crm"}),
    ("target", {"logicalTable": "leads", "orgId": "acme", "tableNamespace": "hr"}),
    ("added", 1),
]


def answered(key: EphemeralKey) -> dict[str, Json]:
    return {**SESSION, "encryptedPostgresUrl": seal_for_request(URL, SESSION, ASKED, key.public)}


def test_a_url_travels_to_the_one_who_asked() -> None:
    key = EphemeralKey()
    assert URL.encode() not in repr(answered(key)).encode()
    assert key.open(answered(key), ASKED) == URL


def test_a_key_opens_one_answer() -> None:
    key = EphemeralKey()
    first = answered(key)
    key.open(first, ASKED)
    with pytest.raises(SessionUnreadable):
        key.open(first, ASKED)


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_INV_43_a_changed_session_does_not_open_on_its_way(field: str, value: Json) -> None:
    key = EphemeralKey()
    with pytest.raises(SessionUnreadable):
        key.open({**answered(key), field: value}, ASKED)


@pytest.mark.parametrize(
    "other", [Asked("run-2", ASKED.request_id), Asked(ASKED.run_id, "another request")]
)
def test_an_answer_to_another_request_does_not_open(other: Asked) -> None:
    key = EphemeralKey()
    with pytest.raises(SessionUnreadable):
        key.open(answered(key), other)


@pytest.mark.parametrize(
    "sealed",
    [
        None,
        "text",
        {},
        {"alg": "none", "ct": "AAAA"},
        {"alg": TRANSPORT},
        {"alg": TRANSPORT, "ct": 3},
        {"alg": TRANSPORT, "ct": "AAAA"},
        {"alg": TRANSPORT, "ct": "A" * 200},
        {"alg": TRANSPORT, "ct": "%%%"},
    ],
)
def test_what_is_no_ciphertext_is_one_error(sealed: Json) -> None:
    with pytest.raises(SessionUnreadable) as refused:
        EphemeralKey().open({**SESSION, "encryptedPostgresUrl": sealed}, ASKED)
    assert refused.value.code == "SESSION_UNREADABLE"


def test_an_all_zero_exchange_is_refused() -> None:
    zeros = urlsafe_b64encode(bytes(32 + 60)).decode()
    with pytest.raises(SessionUnreadable):
        EphemeralKey().open(
            {**SESSION, "encryptedPostgresUrl": {"alg": TRANSPORT, "ct": zeros, "v": 1}}, ASKED
        )


def test_at_rest_the_token_opens_it() -> None:
    sealed = seal_for_token(URL, SESSION, "token-of-the-child")
    at_rest = {**SESSION, "encryptedPostgresUrl": sealed}
    assert "canary" not in repr(at_rest)
    assert open_with_token(at_rest, "token-of-the-child") == URL


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_INV_43_a_changed_session_does_not_open_at_rest(field: str, value: Json) -> None:
    at_rest = {**SESSION, "encryptedPostgresUrl": seal_for_token(URL, SESSION, "token")}
    with pytest.raises(SessionUnreadable):
        open_with_token({**at_rest, field: value}, "token")


def test_INV_44_another_token_does_not_open_it() -> None:
    at_rest = {**SESSION, "encryptedPostgresUrl": seal_for_token(URL, SESSION, "token-a")}
    with pytest.raises(SessionUnreadable):
        open_with_token(at_rest, "token-b")


@pytest.mark.parametrize("part", ["ct", "iv", "salt", "check"])
def test_a_flipped_byte_does_not_open(part: str) -> None:
    sealed = seal_for_token(URL, SESSION, "token")
    text = sealed[part]
    assert isinstance(text, str)
    flipped = bytearray(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    flipped[0] ^= 1
    broken = {**sealed, part: urlsafe_b64encode(bytes(flipped)).decode().rstrip("=")}
    with pytest.raises(SessionUnreadable):
        open_with_token({**SESSION, "encryptedPostgresUrl": broken}, "token")


def test_two_seals_of_one_url_differ() -> None:
    assert seal_for_token(URL, SESSION, "token") != seal_for_token(URL, SESSION, "token")


def test_the_associated_data_is_the_session_without_its_url() -> None:
    with_urls: dict[str, Json] = {
        **SESSION,
        "encryptedPostgresUrl": {"ct": "x"},
        "postgresUrl": URL,
    }
    assert session_aad(with_urls) == session_aad(SESSION)


def test_pyhpke_opens_what_we_seal_and_we_open_what_it_seals() -> None:
    suite = CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.AES256_GCM)
    theirs = suite.kem.derive_key_pair(b"0123456789abcdef0123456789abcdef")
    public = theirs.public_key.to_public_bytes()
    sealed = seal_for_request(URL, SESSION, ASKED, public)
    text = sealed["ct"]
    assert isinstance(text, str)
    raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    recipient = suite.create_recipient_context(
        raw[:32], theirs.private_key, transport_info(SESSION, ASKED, public)
    )
    assert recipient.open(raw[32:]) == URL.encode()

    ours = EphemeralKey()
    encapsulated, sender = suite.create_sender_context(
        KEMKey.from_jwk(
            {
                "crv": "X25519",
                "kty": "OKP",
                "x": urlsafe_b64encode(ours.public).decode().rstrip("="),
            }
        ),
        transport_info(SESSION, ASKED, ours.public),
    )
    reply = urlsafe_b64encode(encapsulated + sender.seal(URL.encode())).decode()
    session: dict[str, Json] = {
        **SESSION,
        "encryptedPostgresUrl": {"alg": TRANSPORT, "ct": reply, "v": 1},
    }
    assert ours.open(session, ASKED) == URL
