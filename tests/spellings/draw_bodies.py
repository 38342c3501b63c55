"""Draws request bodies at random from the parts that `bodies.py` lists, and breaks some of them.

A body depends on its seed and number only.
"""

import random

from bodies import FORM, JSON, Body, raw, text_of

NAMES = ["model", "method", "max_tokens", "params", "name", "x", ""]
SPELLINGS = [
    lambda name, source: name,
    lambda name, source: name.upper(),
    lambda name, source: name.title(),
    lambda name, source: name.replace("_", source.choice(["-", "", ".", " ", "__"])),
    lambda name, source: source.choice(["_", "-", " ", "$"]) + name,
    lambda name, source: name + source.choice(["_", " ", r"\u0000", "[]", r"\t"]),
    lambda name, source: name.replace("s", raw("\u017f")).replace("k", raw("\u212a")),
    lambda name, source: "".join(source.choice([c, f"\\u{ord(c):04x}", f"\\u{ord(c):04X}"]) for c in name),
    lambda name, source: name.replace("o", source.choice([r"\u006f", r"\u006F", raw("\u043e"), "\\o", "\xc1\xaf"])),
]
VALUES = [
    *(
        '"alice"',
        '"bob"',
        '"search"',
        '"tools/call"',
        "1000",
        "5",
        "-0",
        "1e3",
        "1.0",
        "9007199254740993",
        "true",
        "null",
    ),
    *('"1000"', '""', "[]", "{}", '["alice"]', '{"name":"bob"}', r'"\u0061lice"', r'"\ud800"', '"\xff"', '"\xc0\x80"'),
    *("'alice'", "alice", "NaN", "01", ".5", "1_0", r'"\x41"', '"a\tb"', '"alice', raw('"é"'), "1e400"),
]
SPACES = ["", "", "", " ", "\n", "\t", "\r\n", "\x0c", raw("\xa0"), "/**/", "//x\n", "#x\n", "\x00"]
BOMS = ["", "", "", "", "\xef\xbb\xbf", "\xef\xbb\xbf\xef\xbb\xbf", "\xff\xfe", "\xfe\xff"]
TYPES = [
    *([JSON] * 12),
    *(f"{JSON}; charset=utf-8", f"{JSON}; charset=utf-16", f"{JSON};charset=utf-7", f"{JSON}; charset=latin1"),
    *("application/vnd.x+json", "text/plain", "text/json", "", None, FORM, FORM, f"{FORM}; charset=latin1"),
]
ENDS = ["", "", "", "", "\n", "x", "\x00", "{}", ',"model":"bob"', '{"model":"bob"}', "//", "/*", "]", "}"]


def draw(seed, number):
    source = random.Random(f"{seed}/{number}")
    content_type = source.choice(TYPES)
    text = draw_form(source) if (content_type or "").startswith(FORM) and source.random() < 0.7 else draw_json(source)
    if source.random() < 0.25:
        text = break_text(source, text)
    if source.random() < 0.03:
        text = text_of(text.encode(source.choice(["utf-16-le", "utf-16-be", "utf-16", "utf-32-le"])))
    return Body(f"{seed}/{number}", [source.choice(BOMS) + text], content_type, is_chunked=source.random() < 0.1)


def draw_json(source):
    root = draw_object(source, 2)
    if source.random() < 0.05:
        root = f"[{root}]"
    return gap(source) + root + source.choice(ENDS)


def gap(source):
    return source.choice(SPACES) if source.random() < 0.15 else ""


def draw_object(source, depth):
    fields = []
    for _ in range(source.randrange(1, 5)):
        name = source.choice(NAMES)
        if source.random() < 0.35:
            name = source.choice(SPELLINGS)(name, source)
        is_inner = depth and (source.random() < 0.2 or "params" in name)
        value = (
            draw_object(source, depth - 1)
            if is_inner
            else source.choice(VALUES[:14] if source.random() < 0.8 else VALUES)
        )
        quote = source.choice(["'", "", "`"]) if source.random() < 0.03 else '"'
        colon = source.choice(["=", "=>", "", "::"]) if source.random() < 0.02 else ":"
        fields.append(f"{gap(source)}{quote}{name}{quote}{gap(source)}{colon}{gap(source)}{value}{gap(source)}")
    comma = source.choice([";", ",,", " "]) if source.random() < 0.02 else ","
    return "{" + comma.join(fields) + ("," if source.random() < 0.03 else "") + "}"


def draw_form(source):
    fields = []
    for _ in range(source.randrange(1, 5)):
        name = source.choice(NAMES)
        if source.random() < 0.4:
            changes = [name.upper(), f"{name}[]", f"{name}[a]", f"params[{name}]", name.replace("_", "."), f"+{name}"]
            changes += [
                "".join(f"%{ord(c):02x}" for c in name),
                f"{name}%00",
                f"[{name}]",
                name.replace("o", "%6F"),
                f"?{name}",
            ]
            name = source.choice(changes)
        value = source.choice(
            ["alice", "bob", "1000", "a+b", "%61lice", "", "%zz", "caf%E9", "caf%C3%A9", "al%00", '{"model":1}']
        )
        fields.append(name + source.choice(["=", "=", "=", "=", "", "=="]) + value)
    return source.choice(["&", "&", "&", "&", ";", "&&", "&amp;", "\n", "&\r\n"]).join(fields)


def break_text(source, text):
    for _ in range(source.randrange(1, 3)):
        place = source.randrange(len(text) + 1)
        kind = source.randrange(3)
        if kind == 0:
            text = text[:place] + text[place + 1 :]
        elif kind == 1:
            text = text[:place] + chr(source.choice([*range(128), 0x80, 0xC3, 0xFF, *b'"{}[],:\\'])) + text[place:]
        else:
            other = source.randrange(len(text) + 1)
            text = text[:place] + text[min(place, other) : max(place, other)] + text[place:]
    return text
