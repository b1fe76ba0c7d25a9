"""The gate: untrusted bytes become the one value that was meant, or are refused with the place."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger.canonical import canonical
from ledger.errors import JsonInvalid, TooLarge
from ledger.gate import parse


def refusal(data: bytes | str, what: str = "body") -> JsonInvalid:
    with pytest.raises(JsonInvalid) as caught:
        parse(data, what=what)
    return caught.value


def params(inner: bytes | str) -> bytes:
    return b'{"params":' + (inner.encode() if isinstance(inner, str) else inner) + b"}"


@pytest.mark.parametrize(
    ("text", "message", "hint", "code"),
    [
        (
            "world",
            "--input: world is not JSON, line 1 column 1",
            "a string needs its quotes: --input '\"world\"'",
            "JSON_INVALID",
        ),
        (
            '{"a":1,"a":2}',
            '--input: key "a" twice, line 1 column 8, at $',
            "keep one",
            "JSON_DUPLICATE_KEY",
        ),
        (
            '{"a":NaN}',
            "--input: NaN is not JSON, line 1 column 6, at $.a",
            "use null or a string",
            "JSON_NOT_FINITE",
        ),
        (
            '{"id":9007199254740993}',
            "--input: 9007199254740993 at $.id is beyond 9007199254740991",
            "send it as a string",
            "JSON_INTEGER_TOO_LARGE",
        ),
    ],
)
def test_refusals_read_as_documented(text: str, message: str, hint: str, code: str) -> None:
    """The four texts of the documentation, word for word."""
    error = refusal(text, "--input")
    assert (error.message, error.hint, error.code) == (message, hint, code)


@pytest.mark.parametrize(
    ("inner", "shown", "path"),
    [
        ('{"loss":NaN}', "NaN is not JSON, line 1 column 19", "$.params.loss"),
        ('{"x":Infinity}', "Infinity is not JSON, line 1 column 16", "$.params.x"),
        ("[-Infinity]", "-Infinity is not JSON, line 1 column 12", "$.params[0]"),
        ('{"x":1e400}', "1e400 is beyond a double, line 1 column 16", "$.params.x"),
        (
            '[null,[],{},"null",\n 1E999]',
            "1E999 is beyond a double, line 2 column 2",
            "$.params[4]",
        ),
        ("9" * 400 + ".5", f"{'9' * 20}... (402 characters) is beyond", "$.params"),
    ],
)
def test_C025_number_that_is_none_is_refused(inner: str, shown: str, path: str) -> None:
    """NaN, Infinity and what overflows are refused with place and path."""
    error = refusal(params(inner))
    assert error.code == "JSON_NOT_FINITE"
    assert error.message.startswith(f"body: {shown}")
    assert error.message.endswith(f", at {path}")
    assert error.details["path"] == path


def test_C025_negative_zero_and_null_come_back() -> None:
    """What is finite is kept exactly, and a null is a null."""
    body = b'{"params":[-0.0,null,"null",1e-400,"nul\\u006c"]}'
    assert canonical(parse(body)) == b'{"params":[-0.0,null,"null",0.0,"null"]}'


@pytest.mark.parametrize(
    ("inner", "column", "path"),
    [
        (r'{"t":"half \ud83d emoji"}', 22, "$.params.t"),
        (r'{"t":"\ude00"}', 17, "$.params.t"),
        (r'{"t":"\ude00\ud83d"}', 17, "$.params.t"),
        (r'{"t":"\uD83D\uDE00\\\uD83D\n"}', 31, "$.params.t"),
        (r'{"\ud83d":1}', 13, "$.params"),
    ],
)
def test_C026_half_an_emoji_is_refused(inner: str, column: int, path: str) -> None:
    """Half of a surrogate pair is refused where its escape stands."""
    error = refusal(params(inner))
    assert (error.code, error.details["path"]) == ("JSON_LONE_SURROGATE", path)
    assert (error.details["line"], error.details["column"]) == (1, column)


def test_C026_whole_pair_is_one_character() -> None:
    """A correct pair of escapes, and the spelling of a wrong one, are text."""
    assert parse(params(r'{"t":"\ud83d\ude00"}')) == {"params": {"t": "\U0001f600"}}
    assert parse(rb'"\\ud83d"') == "\\ud83d"
    assert refusal('"\udcff"').code == "JSON_LONE_SURROGATE"
    assert refusal(params(b'{"t":"\xed\xa0\xbd"}')).code == "JSON_INVALID_UTF8"


@pytest.mark.parametrize(
    "number",
    [2**53, 2**53 + 1, 3544790567247868102, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, -(2**53)],
)
def test_C028_large_integer_is_refused_with_its_path(number: int) -> None:
    """Beyond what a browser keeps exactly, an integer is refused as it was written."""
    error = refusal(params(f'[1,2,\n{{"id": {number}}}]'))
    limit = 9007199254740991 if number > 0 else -9007199254740991
    assert error.code == "JSON_INTEGER_TOO_LARGE"
    assert error.message == f"body: {number} at $.params[2].id is beyond {limit}"
    assert error.details == {"path": "$.params[2].id", "line": 2, "column": 8}


def test_C028_5000_digits_are_refused_and_the_limit_is_taken() -> None:
    """More digits than int() takes are no ValueError; 2^53-1 is the largest."""
    error = refusal(params('{"id":' + "9" * 5000 + "}"))
    assert error.code == "JSON_INTEGER_TOO_LARGE"
    assert error.message.startswith(
        "body: 99999999999999999999... (5000 characters) at $.params.id"
    )
    assert parse(b"[9007199254740991,-9007199254740991]") == [2**53 - 1, 1 - 2**53]


@pytest.mark.parametrize("depth", [65, 200, 900, 1000, 20_000, 1_000_000])
@pytest.mark.parametrize("opening", ["[", '{"a":', '["]",', '["\\"]",{"\\\\":'])
def test_C029_deep_nesting_is_refused(opening: str, depth: int) -> None:
    """Any depth over 64 is refused at the bracket that is one too many."""
    levels = opening.count("[") + opening.count("{")
    body = (opening * (depth // levels + 1)).encode()
    error = refusal(body)
    assert (error.code, error.details["line"]) == ("JSON_TOO_DEEP", 1)
    column = error.details["column"]
    assert isinstance(column, int)
    assert chr(body[column - 1]) in "[{"
    assert column > len(opening) * (64 // levels)


def test_C029_64_levels_are_taken_beside_any_number_of_brackets() -> None:
    """The limit is of depth: width, and brackets in text, do not count."""
    deepest = "[" * 63 + "]" * 63
    body = "[" + ",".join([deepest] * 50) + ',"' + "[{" * 500 + '\\"[\\\\"]'
    assert canonical(parse(body)) == body.encode()
    wide = f'["é",{",".join(["[]"] * 100_000)},[{deepest}]]'
    error = refusal(wide)
    assert error.code == "JSON_TOO_DEEP"
    assert error.details["column"] == wide.index(deepest) + 63


@given(st.text('[]{}"\\,:a1 ', max_size=400))
@example('"' + "\\" * 3 + "[" * 100)
@example("\\" + "[" * 80 + '"' + "]" * 80)
@settings(deadline=None)
def test_brackets_in_any_disorder_are_refused(text: str) -> None:
    """Quotes, backslashes and brackets where they do not belong mislead no part of the gate."""
    assert refusal(text + "[" * 60).code in {"JSON_INVALID", "JSON_TOO_DEEP", "JSON_DUPLICATE_KEY"}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (params(b'{"t":"\xff"}'), "JSON_INVALID_UTF8", "byte 0xff is not UTF-8, line 1 column 17"),
        (
            params(b'{"t":\n"\xe2\x82"}'),
            "JSON_INVALID_UTF8",
            "byte 0xe2 is not UTF-8, line 2 column 2",
        ),
        (params(b'{"t":"\xc0\xaf"}'), "JSON_INVALID_UTF8", "byte 0xc0 is not UTF-8, "),
        (params(b'{"t":"caf\xe9"}'), "JSON_INVALID_UTF8", "byte 0xe9 is not UTF-8, "),
        (b"\xef\xbb\xbf{}", "JSON_INVALID", "a byte order mark is not JSON, line 1 column 1"),
        ('{"a":1}'.encode("utf-16"), "JSON_INVALID", "UTF-16 is not JSON"),
        ('{"a":1}'.encode("utf-16-le"), "JSON_INVALID", "control character \\x00 is not JSON, "),
        (b"", "JSON_INVALID", "is empty, and that is not JSON"),
        (b" \n", "JSON_INVALID", "is empty, and that is not JSON"),
        (
            params('{"a":1}') + b'{"a":2}',
            "JSON_INVALID",
            "{ after the value is not JSON, line 1 column 19",
        ),
    ],
)
def test_C031_other_encodings_are_refused(body: bytes, code: str, message: str) -> None:
    """Bytes that are not UTF-8 are named by number, never quoted."""
    error = refusal(body)
    assert error.code == code
    assert error.message.startswith(f"body: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":1', "ends too early to be JSON, line 1 column 7"),
        ("[1,\n 2,\n x]", "x is not JSON, line 3 column 2"),
        ("[1,2", "ends too early to be JSON, line 1 column 5"),
        ('["abc', "a string without its end is not JSON, line 1 column 2"),
        ('["a\tb"]', "control character \\x09 is not JSON, line 1 column 4"),
        ('["a\0b"]', "control character \\x00 is not JSON, line 1 column 4"),
        ("{'a':1}", "'a' is not JSON, line 1 column 2"),
        ("2012-01-01", "-01-01 after the value is not JSON, line 1 column 5"),
        ("[\u202e]", "\\u202e is not JSON, line 1 column 2"),
        ("[01]", "1 is not JSON, line 1 column 3"),
        ("[+1]", "+1 is not JSON, line 1 column 2"),
        ("[\xa01]", "\\xa0 is not JSON, line 1 column 2"),
    ],
)
def test_syntax_error_says_where_and_stays_printable(text: str, message: str) -> None:
    """Line and column count from 1, in characters; what is quoted cannot harm a terminal."""
    error = refusal(text)
    assert (error.code, error.message) == ("JSON_INVALID", f"body: {message}")
    assert error.hint
    assert refusal(text.encode()).message == error.message


@pytest.mark.parametrize(
    ("text", "key", "path", "line", "column"),
    [
        ('{"x":[{"b":{"a":1}},{"a":1,\n"b":2,"a":3}]}', "a", "$.x[1]", 2, 7),
        ('{"a":1,"\\u0061":2}', "a", "$", 1, 8),
        ('{"":1,"":2}', "", "$", 1, 7),
        ('[1,2,-3,{"é":[1,2],"é":{}}]', "é", "$[3]", 1, 20),
    ],
)
def test_equal_keys_are_refused(text: str, key: str, path: str, line: int, column: int) -> None:
    """The second of two equal keys is named, however it is written."""
    error = refusal(text)
    assert error.code == "JSON_DUPLICATE_KEY"
    assert error.message == f'body: key "{key}" twice, line {line} column {column}, at {path}'
    assert error.details == {"line": line, "column": column, "path": path}


def test_escaped_nul_is_refused_and_its_spelling_is_not() -> None:
    """Stores and terminals choke on NUL; a backslash before u0000 is only text."""
    error = refusal(r'{"a":["\\u0000\u0000"]}')
    assert error.code == "JSON_NUL"
    assert error.message == "body: a NUL character in a string, line 1 column 15, at $.a[0]"
    assert parse(r'"\\u0000"') == "\\u0000"


def test_size_is_checked_first_and_in_bytes() -> None:
    """A body over its limit is refused unread, characters counting as their bytes."""
    assert parse("1234", max_bytes=4) == 1234
    for data in (b'"\xff\xff\xff"', '"éé"'):
        with pytest.raises(TooLarge) as caught:
            parse(data, what="input", max_bytes=4)
        size = len(data.encode() if isinstance(data, str) else data)
        assert caught.value.message == f"input is {size} bytes, the limit is 4"
        assert caught.value.code == "BODY_TOO_LARGE"
        assert caught.value.details == {"bytes": size, "limit": 4}


@given(st.binary(max_size=60) | st.text('{}[],:"\\ud83e0N1.-aI \n', max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_a_writable_value_or_a_refusal(data: bytes | str) -> None:
    """Nothing but JsonInvalid leaves the gate, its message is one printable line."""
    refused: JsonInvalid | None = None
    try:
        value = parse(data)
    except JsonInvalid as error:
        refused = error
    if refused is None:
        assert json.loads(canonical(value)) == value == json.loads(data)
    else:
        assert refused.message.isprintable()
        assert refused.code.startswith("JSON_")
