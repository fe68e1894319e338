"""Takes keys and passwords out of what leaves this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"
# Words of a name ("SOME_API_KEY_1" has the words some, api, key) that announce a secret.
_WORDS = frozenset(
    [
        "key",
        "keys",
        "apikey",
        "token",
        "tokens",
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "passcode",
        "secret",
        "secrets",
        "credential",
        "credentials",
    ]
)
_MORE_WORDS = frozenset(
    ["pass", "pwd", "pat", "auth", "authorization", "cred", "creds", "dsn", "jwt", "pin", "cookie"]
)
_ENDINGS = ("apikey", "token", "password", "passwd", "passphrase", "secret", "credentials")
_FOLDERS = ("PWD", "OLDPWD")
_NOT_SECRET = ("commit", "fingerprint")
# Values of variables like USE_AUTH: words that stand everywhere and give nothing away.
_PLAIN = frozenset(["auto", "false", "none", "null", "true"])
_MIN_LENGTH = 4
_MIN_LENGTH_ANYWHERE = 8  # shorter ones are looked for as whole words only

_SECRET_VALUE = re.compile(
    r"""
    \b(?:sk|rk|hf|gh[opsur]|github_pat|glpat|gl[a-z]{2,4}t|npm|pypi|xox[a-z]|xapp|wandb_v\d+)
        [-_][A-Za-z0-9_-]{16,}
    | \b[0-9a-f]{40}\b
    | \bA(?:KI|SI)A[0-9A-Z]{16}\b
    | \bAIza[A-Za-z0-9_-]{30,}
    | \beyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?          # JSON web tokens
    | (?<=\b[Bb]earer\ )[^\s,;'"]{4,} | (?<=\bBEARER\ )[^\s,;'"]{4,}        # HTTP headers
    | (?<=\b[Aa]uthorization:\ )[^,;'"]+
    | (?<=://)(?:[^\s/]+|[^\s/@:]*:[^\s@]+)(?=@)                           # user:password@host
    | (?<![\w/])[\w.+-]+:[^\s@/:,]+(?=@[A-Za-z0-9])
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(
    r"""([A-Za-z_][\w.+-]*)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&{}\[\])]+)"""
)
_PASSWORD_OF_URL = re.compile(r"://[^\s/@:]*:([^\s@]+)@")


def masked(value: Any, name: str = "") -> Any:
    """`value` with everything that looks like a key or a password replaced by `***`.

    Looks at names (api_key, token, password; also in "name=value"), at values in the shape of
    known kinds of keys, and at values equal to that of an environment variable with such a name or
    to the password of a URL there (4 characters or more). Keys of mappings count as values too.
    """
    return _masked(value, name, environment_secrets(os.environ))


def environment_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values that the environment's names, or passwords in its URLs, say are secret."""
    found = set()
    for name, value in environment.items():
        if _announces_secret(name):
            found.add(value.strip())
        for password in _PASSWORD_OF_URL.findall(value):
            found |= {password, unquote(password)}
    found = {
        value
        for value in found
        if len(value) >= _MIN_LENGTH_ANYWHERE
        or (len(value) >= _MIN_LENGTH and not value.isdigit() and value.lower() not in _PLAIN)
    }
    return sorted(found, key=len, reverse=True)  # one may be part of another


def _masked(value: Any, name: str, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, inner in value.items():
            shown = _distinct(_masked_text(str(key), secrets), result)
            result[shown] = _masked(inner, str(key), secrets)
        return result
    if isinstance(value, (list, tuple)):
        return [_masked(inner, name, secrets) for inner in value]
    if not isinstance(value, str) or name in _NOT_SECRET:
        return value
    if _is_secret_name(name) and value:
        return MASK
    return _masked_text(value, secrets)


def _masked_text(text: str, secrets: Iterable[str]) -> str:
    assigned, separator, _ = text.partition("=")
    if separator and _is_secret_name(assigned):
        text = f"{assigned}={MASK}"
    text = _ASSIGNED.sub(_without_value, text)
    for secret in secrets:
        if len(secret) >= _MIN_LENGTH_ANYWHERE:
            text = text.replace(secret, MASK)
        elif secret in text:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", MASK, text)
    return _SECRET_VALUE.sub(MASK, text)


def _without_value(found: re.Match[str]) -> str:
    name, between, _ = found.groups()
    prose = ":" in between and _words(name)[-1:] == [name.lower()]  # "no such key: ..."
    return f"{name}{between}{MASK}" if _is_secret_name(name) and not prose else found[0]


def _distinct(key: str, known: Mapping[str, Any]) -> str:
    """`key`, with a number where it is taken already: two secret keys are two entries."""
    number = 1
    while (shown := key if number == 1 else f"{key}{number}") in known:
        number += 1
    return shown


def _is_secret_name(name: str) -> bool:
    """Whether a setting of that name holds a secret: by the end of the name, so that
    tokens_per_step does not."""
    words = _words(name)
    return bool(words) and (words[-1] in _WORDS or words[-1].endswith(_ENDINGS))


def _announces_secret(variable: str) -> bool:
    """Whether an environment variable's name says that its value is a secret; rather too often
    than too rarely."""
    return variable not in _FOLDERS and any(
        word in _WORDS or word in _MORE_WORDS or word.endswith((*_ENDINGS, "key"))
        for word in _words(variable)
    )


def _words(name: str) -> list[str]:
    """Lower-case words of a name; numbers are dropped ("myApiKey2" has my, api, key)."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return [word.lower() for word in re.findall(r"[A-Za-z]+", parted)]
