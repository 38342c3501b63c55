"""Draws spellings from a grammar of mutations. A draw depends on its seed and number only.

A character of a spelling is one byte (Latin-1). A spelling of the kind "fields" is one or more complete header lines.
"""

import base64
import random

# What is spelled, by kind. The weights are the share of each kind.
PLAIN = {
    "target": ["/login", "/login/alice", "/admin/users"],
    "query": ["api_key=alice"],
    "cookie": ["session=alice"],
    "header": ["alice"],
    "fields": ["X-User: alice", "Cookie: session=alice", "Authorization: Bearer alice"],
    "authorization": ["Bearer alice", "Basic YWxpY2U6c2VjcmV0"],
    "host": ["alice.test"],
}
WEIGHTS = {"target": 5, "query": 5, "cookie": 5, "header": 3, "fields": 5, "authorization": 2, "host": 2}
DEPTHS = [1, 1, 1, 2, 2, 2, 2, 3, 3, 4]


def utf8(*points):
    return [chr(point).encode().decode("latin-1") for point in points]


def percent(text):
    return "".join(f"%{ord(byte):02X}" for byte in text)


SPACES = [" ", "\t", "  ", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0", "\xad"]
SPACES += utf8(
    *(0x85, 0xA0, 0xAD, 0x34F, 0x61C, 0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202E, 0x202F),
    *(0x205F, 0x2060, 0x2061, 0x2064, 0x2800, 0x3000, 0x3164, 0xFE0F, 0xFEFF, 0xFFA0, 0xFFF9, 0xFFFD, 0xE0020),
)
DELIMITERS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
# Written by the encodings of paths, queries and many cookies.
ESCAPES = ["+", "%", "%%", "%u0020", "%u00A0", "%C0%A0", "%C1%81", "%E2%80%8B", "%F0%9F%98%80", "%0D%0A", "%EF%BB%BF"]
NUMBERS = ["", "0", "1", "00", "-1", "+", "x", "__proto__", "constructor", "toString"]


def any_piece(rng):
    """Something that some parser may drop."""
    choice = rng.randrange(8)
    if choice < 2:
        return rng.choice(SPACES)
    if choice < 4:
        return percent(rng.choice([*SPACES, chr(rng.randrange(256))]))
    if choice == 4:
        return chr(rng.randrange(256))
    if choice == 5:
        return rng.choice(DELIMITERS)
    if choice == 6:
        return rng.choice(ESCAPES)
    return percent(percent(rng.choice(SPACES)))


def insert(rng, text):
    """At an end, beside a delimiter, or rarely anywhere."""
    near = [at for at, byte in enumerate(text) if not byte.isalnum()]
    places = [0, len(text), len(text), *near, *(at + 1 for at in near)]
    at = rng.choice(places) if rng.random() < 0.93 else rng.randrange(len(text) + 1)
    return text[:at] + any_piece(rng) * rng.choice([1, 1, 1, 2]) + text[at:]


def encode_byte(rng, byte):
    code = ord(byte)
    wide = chr(0xFEE0 + code).encode() if 0x21 <= code <= 0x7E else byte.encode("latin-1")
    return rng.choice(
        [
            f"%{code:02x}",
            f"%{code:02X}",
            f"%{code:02x}",
            f"%25{code:02x}",
            f"%2525{code:02x}",
            f"%u00{code:02x}",
            f"%U00{code:02X}",
            f"\\{code:03o}",
            f"\\x{code:02x}",
            f"\\u00{code:02x}",
            f"\\{byte}",
            f"&#{code};",
            f"&#x{code:x};",
            f"%C{code >> 6}%{0x80 | code & 0x3F:02X}",
            f"%E0%8{code >> 6}%{0x80 | code & 0x3F:02X}",
            f"={code:02X}",
            wide.decode("latin-1"),
            percent(wide.decode("latin-1")),
            byte.swapcase(),
            byte + "\u00cc\u0081",
        ]
    )


def encode(rng, text):
    """Another spelling of one byte, or the same for all letters."""
    letters = [at for at, byte in enumerate(text) if byte.isalnum()] if rng.random() < 0.8 else range(len(text))
    if not letters:
        return text
    if rng.random() < 0.15:
        state = rng.getstate()
        parts = []
        for byte in text:
            rng.setstate(state)
            parts.append(encode_byte(rng, byte) if byte.isalnum() else byte)
        return "".join(parts)
    at = rng.choice(letters)
    return text[:at] + encode_byte(rng, text[at]) + text[at + 1 :]


WRAPPERS = [
    *('"{}"', "'{}'", "`{}`", "<{}>", "({})", "[{}]", "{{{}}}", '""{}""', '"{}', '{}"', '" {}"', '"{} "', '"{}";x'),
    *('j:"{}"', "j:{}", "s:{}", "s:{}.x", "%22{}%22", "b'{}'", 'W/"{}"', "utf-8''{}", "{}; charset=utf-8", "{} (x)"),
    *("{},", ",{}", "{}, ", " ,{}", "{};", ";{}", "{}#x", "{}?x", "{}&x", "{}|x", "{}:x", "x:{}", "{}/x", "{}=", "={}"),
    *("{},bob", "bob,{}", "{}, {}", "{} x", "x {}", "{}\tx", "{}\x00x", "{}%00x", "{}\\", "\\{}", "{}\\x", "{}\r\n x"),
    *("\r\n {}", "\r\n\t{}", "{}\r\n ", "{}\r\n\t", "{}\n", "{}\r", "\r{}", "{}\n x", "${}", "+{}", "{}%", "{}*"),
    *("{}]", "{}[", "{}[]", "]{}", "[{}", "{}}}", "{{{}", "{}\xa0", "\xa0{}", "{}\x85", "\x85{}", "{}\x00", "\x00{}"),
]
WORDS = ["=?utf-8?q?{}?=", "=?UTF-8?Q?{}?=", "=?iso-8859-1?q?{}?=", "=?us-ascii?Q?{}?=", "=?utf-8*en?q?{}?="]


def encoded_word(rng, value):
    if rng.random() < 0.5:
        return f"=?utf-8?{rng.choice('bB')}?{base64.b64encode(value.encode('latin-1')).decode()}?="
    text = value if rng.random() < 0.6 else "".join(f"={ord(byte):02X}" for byte in value)
    word = rng.choice(WORDS).format(text)
    if rng.random() < 0.3:
        at = rng.randrange(1, len(value)) if len(value) > 1 else 0
        word = value[:at] + rng.choice(["", " "]) + rng.choice(WORDS).format(value[at:])
    return word


def value_of(rng, value):
    """Another spelling of a value."""
    choice = rng.randrange(10)
    if choice < 4:
        return insert(rng, value)
    if choice < 7:
        return encode(rng, value)
    if choice == 7:
        return encoded_word(rng, value)
    return rng.choice(WRAPPERS).format(*[value] * 2)


NAMES = [
    *("__Host-{}", "__Secure-{}", "__host-{}", "__HOST-{}", "__Http-{}", "__Host-Http-{}", "${}", "_{}", ".{}", "+{}"),
    *("{}[]", "{}[0]", "{}[x]", "{}[", "{}]", "[{}]", "[{}", "]{}", "{}[][]", "{}[0][0]", "{}%5B%5D", "{}%5B0%5D"),
    *("%5B{}%5D", "{}.0", "{}.", "{}:", "{};", "{}*", "{}*0", "{}+", "{}%00", "{}%00x", "{}\x00", "{}\x00x", "{}%20"),
    *("%20{}", " {}", "{} ", "\t{}", "{}\t", '"{}"', "'{}'", "?{}", "&{}", "={}", "amp;{}", "x[{}]", "{}[x][{}]", "-{}"),
    *("{}%3D", "{}=x;{}", "%EF%BB%BF{}", "\u00ef\u00bb\u00bf{}", "\xa0{}", "{}\xa0", "\x85{}", "%C2%A0{}", "{}%C2%A0"),
    *("__proto__[{}]", "constructor[{}]", "this.{}", "$.{}", "{}$", "@{}", "{}@", "{}!", "!{}", "{}~", "{}/", "/{}", "{}|"),
]
SEPARATORS = [
    *(";", "; ", " ; ", ",", ", ", " ,", "&", "&&", " ", "\t", "?", "#", "|", "%26", "%3B", "%3F", "%23", "&amp;", "%00"),
    *("\n", "\r", "\x00", "\x0b", "\x0c", "\xa0", "\x85", ";;", ",,", "/", "\\", ":", "+", "%0A", "\r\n ", ";\t", ";\xa0"),
]


def name_of(rng, name):
    choice = rng.randrange(8)
    if choice < 4:
        return rng.choice(NAMES).format(*[name] * 2)
    if choice == 4:
        return insert(rng, name)
    if choice == 5:
        return encode(rng, name)
    if choice == 6:
        return rng.choice([str.upper, str.title, str.capitalize, str.swapcase])(name)
    replaced = rng.choice([".", " ", "+", "-", "%20", "%2E", "%5F", "[", "%5B", "_", "__", "", "\u00a0"])
    return name.replace("_", replaced).replace("-", replaced)


def decoys(name):
    pairs = ["", "a=1", "x", "=", "a", "a=", "=x", "[1]=2", 'a="', "a='", 'a="b', "$Version=1", '$Version="1"', "$Path=/"]
    pairs += ["secure", "HttpOnly", "a=b c", "a=\\", "a={}", "a=%", "a=%zz", "a=\xff", "\xff=1", "%FF=1", "a\x00b=1", "a=,b"]
    return pairs + [f"{name}=bob", f"{name}=", name, f"{name}[]=bob", f"{name.upper()}=bob", f'{name}="bob', f"x{name}=bob"]


def pair_of(rng, pair, separators):
    """Another spelling of a cookie or parameter."""
    name, _, value = pair.partition("=")
    choice = rng.randrange(10)
    if choice < 4:
        return f"{name}={value_of(rng, value)}"
    if choice < 6:
        return f"{name_of(rng, name)}={value}"
    if choice == 6:
        return insert(rng, pair)
    separator = rng.choice(separators if rng.random() < 0.5 else SEPARATORS)
    parts = [rng.choice(decoys(name)), pair]
    if rng.random() < 0.5:
        parts.reverse()
    return separator.join(parts)


def query_of(rng, text):
    return pair_of(rng, text, ["&"])


def cookie_of(rng, text):
    return pair_of(rng, text, ["; ", ";"])


def credentials_of(rng, text):
    scheme, _, rest = text.partition(" ")
    choice = rng.randrange(8)
    if choice < 2:
        return f"{scheme}{rng.choice(['', any_piece(rng), any_piece(rng) + ' ', ' ' + any_piece(rng)])}{rest}"
    if choice == 2:
        return f"{rng.choice([scheme.upper(), scheme.lower(), scheme.swapcase(), insert(rng, scheme)])} {rest}"
    if choice == 3:
        return rng.choice([f"{text}, {scheme} bob", f"{scheme} bob, {text}", f"{text} bob", f"{scheme} {text}", rest])
    if choice == 4:
        at = rng.randrange(len(rest) + 1)
        return f"{scheme} {rest[:at]}{any_piece(rng)}{rest[at:]}"
    if choice == 5:
        return f"{scheme} {rest}{rng.choice(['=', '==', '===', 'A', '=A', '==AAAA', '.', '*', ',', ';x', ' x'])}"
    return f"{scheme} {value_of(rng, rest)}"


HOSTS = [
    *("{}.", "{}..", ".{}", "{}:", "{}:80", "{}:080", "{}:0", "{}:65616", "{}:80:80", "{}:+80", "{}: 80", "{} :80", "{}:x"),
    *("a@{}", "a:b@{}", "@{}", "{}@", "[{}]", "{}/", "{}/x", "{}?x", "{}#x", "{}\\", "{}\\x", "{},bob.test", "bob.test,{}"),
    *("{}.:80", "{}%2E", "{};x", "//{}", "http://{}", "{} bob.test", "www.{}", "{}%00", "{}%20", "{}\u00e3\u0080\u0082"),
    *("{}:\u00d9\u00a0", "{}&x", "{}\xa0", "bob.test@{}", "{}:80@bob.test", "bob.test/{}", "bob.test?{}", "bob.test#@{}", "*.{}"),
]


def host_of(rng, text):
    choice = rng.randrange(6)
    if choice < 3:
        return rng.choice(HOSTS).format(text)
    if choice == 3:
        return insert(rng, text)
    if choice == 4:
        return encode(rng, text)
    return rng.choice([text.upper(), text.title(), text.replace(".", rng.choice(utf8(0x3002, 0xFF0E, 0xFF61) + ["%2e"]))])


def fields_of(rng, text):
    """Other lines of a field."""
    lines = text.split("\r\n")
    at = rng.choice([at for at, line in enumerate(lines) if ":" in line] or [0])
    name, _, value = lines[at].partition(":")
    value = value.removeprefix(" ")
    decoy = {"cookie": "session=bob", "authorization": "Bearer bob"}.get(name.lower(), "bob")
    choice = rng.randrange(10)
    if choice < 3:
        if rng.random() < 0.4:
            twins = ["X_User", "X.User", "X User", "HTTP_X_USER", "X-User_", "_X-User", "X-User-", "X--User", "x-user", "X-USER"]
            twins = [twin.replace("X", name.split("-")[0], 1) for twin in twins] if "-" not in name else twins
            name = rng.choice(twins)
        else:
            name = rng.choice([name.replace("-", "_"), name.upper(), name_of(rng, name), insert(rng, name)])
        lines[at] = f"{name}: {value}"
    elif choice < 5:
        extra = rng.choice([decoy, "", " ", value, value_of(rng, decoy), "x=1", "\xff"])
        twin = rng.choice([name, name, name.replace("-", "_"), name.upper(), name_of(rng, name)])
        lines.insert(rng.choice([at, at + 1]), f"{twin}: {extra}")
    elif choice == 5:
        colon = rng.choice([":", ":  ", " :", " : ", ":   ", "::", ":\x00", ":\xa0", ":\t", "=", ": :"])
        lines[at] = name + colon + value
    elif choice == 6:
        listed = rng.choice([name, name.lower(), f"close, {name}", f"{name}, x", "x"])
        field = rng.choice(["Connection", "Trailer", "Vary", "TE", "Keep-Alive", "Proxy-Connection", "Upgrade"])
        lines.insert(rng.choice([at, at + 1]), f"{field}: {listed}")
    elif choice == 7:
        cut = rng.randrange(len(value) + 1)
        fold = rng.choice(["\r\n ", "\r\n\t", "\n ", "\r ", "\r\n  "])
        lines[at] = f"{name}: {value[:cut]}{fold}{value[cut:]}"
    elif choice == 8 and name.lower() == "cookie":
        first, _, rest = value.partition("=")
        cut = rng.randrange(len(rest) + 1)
        crumbs = rng.choice(
            [
                ["a=1", value],
                [value, "a=1"],
                [f"{first}=bob", value],
                [value, f"{first}=bob"],
                [f"{first}=", value],
                [f"{first}", f"={rest}"],
                [f"{first}={rest[:cut]}", rest[cut:]],
                ['a="', value, '"'],
                ["$Version=1", value, "$Path=/"],
                ["a=1,", value],
                ["", value],
                [value + ";", ""],
                [f"__Host-{value}"],
            ]
        )
        lines[at : at + 1] = [f"{name}: {crumb}" for crumb in crumbs]
    else:
        spell = cookie_of if name.lower() == "cookie" else credentials_of if name.lower() == "authorization" else value_of
        lines[at] = f"{name}: {spell(rng, value)}"
    return "\r\n".join(lines)


SEGMENTS = [
    *(".", "..", "x/..", "x/../", "", "/", "//", "%2e", "%2E%2e", ".%2e", "..;", ".;x", ";", ";x=1", ";/", "..;/", "x;/.."),
    *("%2F", "%2f", "%5C", "\\", "\\..", "..\\", "..%2F", "..%5C", "%2e%2e%2f", "%252e%252e", "..%252F", "%00", "%20", "+", "*"),
    *("\t", "%09", "%0A", "%0D", "%7F", "%80", "%A0", "%C2%A0", "%C0%AE", "%C0%AF", "%E0%80%AF", "%EF%BC%8F", "%u002F", "%u2215"),
    *("%3B", "%3Fx", "%23x", "...", "~", ":", "@", "!", "a.test", "[::1]", "public/..", "healthz/..", "public/..;x", "public%2F.."),
    *("x%2F..", "x%5C..", "public/%2e%2e", "public/..%2F", "public//..", "healthz/..%5C", "login/..", "x/./..", "./x/../.", "%2F.."),
]
ENDS = [
    *("/", "//", "/.", "/./", ".", "..", ";", ";x", ";x=1", ";/", "%20", "%09", "%0A", "%0d%0a", "%00", "%00.html", "%80", "%FF"),
    *("?", "?x", "?/", "#", "#x", "%3F", "%3Fx", "%23", "%23x", "%2F", "%5C", "\\", ".json", ".html", "%2Ejson", "~", "*", "+", "&"),
    *("/x/..", "/%2e", "/..;/login", "%C2%A0", "%E2%80%8B", "%C0%80", ",", ":", "=", "!", "%2F..%2Flogin", "%3B", "%3Bx", "/index"),
]
STARTS = [
    *("/", "//", "/.", "/./", "/x/..", "//x", "//app.test", "//x:80", "//u@x", "/\\x", "/\\", "\\", "/%2F", "/%5C", "/;", "/;x"),
    *("http://app.test", "HTTP://APP.TEST", "http://app.test:80", "http://x", "https://app.test", "http:", "http://app.test/x/..", "?"),
    *("/public/..", "/public/%2e%2e", "/public/..;", "/public//..", "/public/x/../..", "/healthz/..", "/public/..%2F..", "/../..", ""),
    *("/%2e%2e", "/%2e", "/..;", "/...", "/%20", "/%00", "/%09", "/+", "/:80", "/[::1]", "#", "/x%2F..", "/x\\..", "/public%2F..", "*"),
]


def target_of(rng, text):
    choice = rng.randrange(8)
    if choice < 2:
        parts = text.split("/")
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(SEGMENTS))
        return rng.choice(["/", "/", "/", "%2F", "\\"]).join(parts) if rng.random() < 0.1 else "/".join(parts)
    if choice == 2:
        return text + rng.choice(ENDS)
    if choice == 3:
        return rng.choice(STARTS) + text
    if choice == 4:
        return insert(rng, text)
    if choice < 7:
        return encode(rng, text)
    slashes = [at for at, byte in enumerate(text) if byte == "/"] or [0]
    at = rng.choice(slashes)
    return text[:at] + rng.choice(["%2F", "%2f", "\\", "%5C", "//", "/./", "/;/", "%252F", "/%2F", "/\\"]) + text[at + 1 :]


MUTATIONS = {
    "target": target_of,
    "query": query_of,
    "cookie": cookie_of,
    "header": value_of,
    "fields": fields_of,
    "authorization": credentials_of,
    "host": host_of,
}


def draw(seed, number):
    """Kind and spelling."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
    text = rng.choice(PLAIN[kind])
    for _ in range(rng.choice(DEPTHS)):
        text = MUTATIONS[kind](rng, text)
    return kind, text


def draws(seed, count):
    """So many different spellings: their numbers by kind and text."""
    found = {}
    number = 0
    while len(found) < count:
        kind, text = draw(seed, number)
        # Not a request of its own, and one byte per character: `µ` in upper case is outside Latin-1.
        if max(text, default="") <= "\xff" and "\r\n\r\n" not in text and "\n\n" not in text and (kind == "fields" or "\r\n" not in text):
            found.setdefault((kind, text), number)
        number += 1
    return found
