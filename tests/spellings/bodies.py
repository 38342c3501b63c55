"""Request bodies that carry `model`, `method`, `max_tokens` and `params.name` in many spellings.

A body is a list of parts: a text, each character of which is one byte, or a text and how often it is repeated.
"""

import gzip
import json
import zlib
from dataclasses import dataclass, field

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
BOUNDARY = "XbX"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass
class Body:
    name: str
    parts: list
    content_type: str | None = JSON
    headers: dict = field(default_factory=dict)
    is_chunked: bool = False

    def bytes(self):
        return b"".join(
            part.encode("latin-1") if isinstance(part, str) else part[0].encode("latin-1") * part[1]
            for part in self.parts
        )


def raw(text):
    """UTF-8, as one character per byte."""
    return text.encode().decode("latin-1")


def text_of(data):
    return data.decode("latin-1")


PLAIN = '{"model":"alice","method":"tools/call","params":{"name":"search"},"max_tokens":1000}'


def with_model(value):
    return f'{{"model":{value}}}'


def all_bodies():
    bodies = []

    def add(name, text, content_type=JSON, **more):
        bodies.append(Body(name, text if isinstance(text, list) else [text], content_type, **more))

    add("plain", PLAIN)
    add("spaces", ' \t\r\n{ "model" : "alice" ,\n"max_tokens"\t:\r1000 } \n')
    add("other order", '{"max_tokens":1000,"params":{"x":1,"name":"search"},"method":"tools/call","model":"alice"}')
    add("empty", "")
    add("empty object", "{}")
    add("nothing of interest", '{"a":1}')
    add_duplicates(add)
    add_names(add)
    add_values(add)
    add_numbers(add)
    add_syntax(add)
    add_roots(add)
    add_encodings(add)
    add_content_types(add)
    add_forms(add)
    add_long(add)
    names = [body.name for body in bodies]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return bodies


def add_duplicates(add):
    add("model twice", '{"model":"alice","model":"bob"}')
    add("model twice, equal", '{"model":"alice","model":"alice"}')
    add("model three times", '{"model":"alice","model":"bob","model":"carol"}')
    add("model, then null", '{"model":"alice","model":null}')
    add("null, then model", '{"model":null,"model":"alice"}')
    add("model, then an object", '{"model":"alice","model":{"a":1}}')
    add("model, then a number", '{"model":"alice","model":5}')
    add("model twice, escaped", r'{"model":"alice","\u006dodel":"bob"}')
    add("model twice, escaped first", r'{"\u006dodel":"bob","model":"alice"}')
    add("model twice, far apart", ['{"model":"alice","x":"', ["y", 70000], '","model":"bob"}'])
    add("model twice, after 60 KiB", ['{"model":"alice","x":"', ["y", 61000], '","model":"bob"}'])
    add("method twice", '{"method":"tools/call","method":"tools/list"}')
    add("max_tokens twice", '{"max_tokens":1,"max_tokens":100000}')
    add("params twice", '{"params":{"name":"search"},"params":{"name":"delete"}}')
    add("params twice, the second without name", '{"params":{"name":"search"},"params":{"x":1}}')
    add("params twice, the first without name", '{"params":{"x":1},"params":{"name":"search"}}')
    add("params, then null", '{"params":{"name":"search"},"params":null}')
    add("name twice", '{"params":{"name":"search","name":"delete"}}')
    add("name in another object", '{"other":{"name":"delete"},"params":{"name":"search"}}')
    add("model twice elsewhere", '{"other":{"model":"x","model":"y"},"model":"alice"}')
    add("another name twice", '{"a":1,"a":2,"model":"alice"}')
    add("model in another object", '{"other":{"model":"bob"},"model":"alice"}')
    add("model only in another object", '{"other":{"model":"bob"}}')
    add("model as a value", '{"a":"model","b":"alice"}')
    add("model in a text", r'{"a":"\",\"model\":\"bob","model":"alice"}')


def add_names(add):
    for shown, name in {
        "escaped m": r"\u006dodel",
        "all escaped": r"\u006d\u006f\u0064\u0065\u006c",
        "escape in capitals": r"mod\u0065\u006C",
        "Model": "Model",
        "MODEL": "MODEL",
        "mOdEl": "mOdEl",
        "space before": " model",
        "space after": "model ",
        "tab after": r"model\t",
        "newline after": r"model\n",
        "NUL after": r"model\u0000",
        "NUL before": r"\u0000model",
        "NUL and more": r"model\u0000x",
        "zero-width space": raw("model\u200b"),
        "BOM inside": raw("\ufeffmodel"),
        "soft hyphen": raw("mo\u00addel"),
        "full width": raw("\uff4d\uff4f\uff44\uff45\uff4c"),
        "Cyrillic o": raw("m\u043edel"),
        "math letters": raw("\U0001d426odel"),
        "combining mark": raw("model\u0301"),
        "underscore": "_model",
        "dash": "mo-del",
        "dotted": "$.model",
        "path": "/model",
        "brackets": "model[]",
        "solidus escaped": r"\/model",
        "empty and model": "",
    }.items():
        add(f"name: {shown}", f'{{"{name}":"alice"}}')
        add(f"name: {shown}, and model", f'{{"model":"bob","{name}":"alice"}}')
    for shown, name in {
        "escaped _": r"max\u005ftokens",
        "dash": "max-tokens",
        "no separator": "maxtokens",
        "camel": "maxTokens",
        "Pascal": "MaxTokens",
        "capitals": "MAX_TOKENS",
        "capitals, dash": "MAX-TOKENS",
        "two underscores": "max__tokens",
        "space": "max tokens",
        "dot": "max.tokens",
        "Kelvin sign": raw("max_to\u212aens"),
        "Kelvin sign, escaped": r"max_to\u212aens",
        "long s": raw("max_token\u017f"),
        "long s, escaped": r"max_token\u017f",
        "underscores around": "_max_tokens_",
        "dotless i": raw("max_token\u0131"),
    }.items():
        add(f"name: max_tokens, {shown}", f'{{"{name}":1}}')
        add(f"name: max_tokens, {shown}, and max_tokens", f'{{"max_tokens":1,"{name}":100000}}')
        add(f"name: max_tokens, {shown}, before max_tokens", f'{{"{name}":100000,"max_tokens":1}}')
    add("name: Method", '{"Method":"tools/call"}')
    add("name: Params", '{"Params":{"name":"search"}}')
    add("name: params.Name", '{"params":{"Name":"search"}}')
    add("name: params and Params", '{"params":{"name":"search"},"Params":{"name":"delete"}}')
    add("name: name and Name", '{"params":{"name":"search","Name":"delete"}}')
    add("name: escaped params", r'{"p\u0061rams":{"n\u0061me":"search"}}')
    add("name: __proto__", '{"__proto__":{"model":"alice"}}')
    add("name: __proto__ and model", '{"model":"bob","__proto__":{"model":"alice"}}')
    add("name: params.__proto__", '{"params":{"__proto__":{"name":"search"}}}')
    add("name: constructor", '{"constructor":{"prototype":{"model":"alice"}}}')
    add("name: invalid UTF-8 in another", '{"\xff":1,"model":"alice"}')
    add("name: lone surrogate in another", r'{"\ud800":1,"model":"alice"}')
    add("name: lone surrogate", r'{"mode\ud800l":"alice","model":"bob"}')
    add("name: no quotes", "{model:'alice'}")


def add_values(add):
    for shown, value in {
        "escaped": r'"\u0061lice"',
        "escaped in capitals": r'"alic\u0065\u002D"',
        "escapes": r'"\"\\\/\b\f\n\r\t"',
        "bad escape": r'"\alice"',
        "escape x": r'"\x61lice"',
        "escape apostrophe": r'"alice\'"',
        "octal escape": r'"\141lice"',
        "short escape": r'"\u61"',
        "escape with a sign": r'"\u+061"',
        "escape with braces": r'"\u{61}lice"',
        "surrogate pair": r'"\ud83d\ude00"',
        "surrogate pair and UTF-8": raw('"\U0001f600"'),
        "lone high surrogate": r'"alice\ud800"',
        "lone low surrogate": r'"alice\udc00"',
        "surrogates reversed": r'"\ude00\ud83d"',
        "high surrogate and a letter": r'"\ud800a"',
        "NUL escaped": r'"alice\u0000"',
        "NUL": '"alice\x00"',
        "newline": '"ali\nce"',
        "tab": '"ali\tce"',
        "DEL": '"alice\x7f"',
        "control character": '"alice\x01"',
        "backslash and newline": '"ali\\\nce"',
        "line separator": raw('"alice\u2028"'),
        "noncharacter": raw('"alice\uffff"'),
        "composed": raw('"é"'),
        "decomposed": raw('"e\u0301"'),
        "capitals": '"ALICE"',
        "spaces around": '" alice "',
        "empty": '""',
        "true": "true",
        "false": "false",
        "null": "null",
        "True": "True",
        "None": "None",
        "undefined": "undefined",
        "nil": "nil",
        "list": '["alice"]',
        "object": '{"id":"alice"}',
        "text 5": '"5"',
        "text true": '"true"',
        "text null": '"null"',
        "single quotes": "'alice'",
        "no quotes": "alice",
        "backquotes": "`alice`",
        "curly quotes": raw("“alice”"),
        "two texts": '"ali""ce"',
        "sum": '"ali"+"ce"',
        "unterminated": '"alice',
        "date": '"2026-01-01T00:00:00Z"',
        "hex float text": '"0x10"',
    }.items():
        add(f"value: {shown}", with_model(value))
    add("value: params a list", '{"params":["search"]}')
    add("value: params a list of an object", '{"params":[{"name":"search"}]}')
    add("value: params a text", '{"params":"search"}')
    add("value: params a document in a text", r'{"params":"{\"name\":\"search\"}"}')


NUMBERS = """0 -0 00 01 0100 007 5 -5 +5 +1 5. .5 5.0 5.50 -0.0 0e0 0e99999 1e3 1E3 1e+3 1e-3 1000e-3 10000e-1 1.0e3
1000.0 1000.00 1000.5 1e 1e+ 1.e3 1e3.0 0x10 0X1F 0b1 0o17 1_000 1,000 1L 1f 1d 10n NaN -NaN nan Infinity -Infinity inf
+Infinity 1e400 -1e400 1e308 1e-400 1e19 1e15 1e16 9007199254740991 9007199254740992 9007199254740993 -9007199254740993
9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 123456789012345678901234567890
0.1 0.30000000000000004 0.3000000000000000444 100000000000000000000000.0 1000.0000000000000001 999.99999999999999999
- -- -a --5 5- 5a 0.0.1 ١٢٣ ５ ²""".split()


def add_numbers(add):
    for number in NUMBERS:
        add(f"number: {number}", f'{{"model":{raw(number)},"max_tokens":{raw(number)}}}')
        if number[0] in "0159+-." or number in ("NaN", "Infinity"):
            add(f"number as text: {number}", f'{{"max_tokens":"{raw(number)}"}}')
    for text in (" 5", "5 ", "5\\n", "5\\u0000", "1 000"):
        add(f"number as text: {text!r}", f'{{"max_tokens":"{text}"}}')
    add("number: 64 KiB of digits", ['{"max_tokens":', ["1", 65536], "}"])
    add("number: 5000 digits", ['{"max_tokens":', ["1", 5000], ',"model":"alice"}'])
    add("number: 5000 zeros", ['{"max_tokens":1', ["0", 5000], ',"model":"alice"}'])
    add("number: 5000 zeros after the point", ['{"max_tokens":1.', ["0", 5000], ',"model":"alice"}'])
    add("number: 5000 zeros, exponent", ['{"max_tokens":1', ["0", 5000], 'e-5000,"model":"alice"}'])
    add("number: long exponent", ['{"max_tokens":1e', ["0", 5000], '3,"model":"alice"}'])
    add("number: another one is long", ['{"x":', ["1", 5000], ',"model":"alice"}'])
    add("number: another one is 1e400", '{"x":1e400,"model":"alice"}')
    for text in ("5", "1000", "100000"):
        add(f"number as text: max_tokens {text!r} and model", f'{{"max_tokens":"{text}","model":"alice"}}')
    add("number: another one is NaN", '{"x":NaN,"model":"alice"}')


def add_syntax(add):
    for shown, text in {
        "comment": '{/*"model":"bob",*/"model":"alice"}',
        "comment, later": '{"model":"alice"/*,"model":"bob"*/}',
        "comment before": '/**/{"model":"alice"}',
        "comment after": '{"model":"alice"}/**/',
        "line comment": '{"model":"alice"//,"model":"bob"\n}',
        "line comment before": '//x\n{"model":"alice"}',
        "hash comment": '{"model":"alice"#,"model":"bob"\n}',
        "HTML comment": '<!--\n{"model":"alice"}',
        "trailing comma": '{"model":"alice",}',
        "two commas": '{"model":"alice",,"max_tokens":1}',
        "leading comma": '{,"model":"alice"}',
        "no comma": '{"model":"alice" "max_tokens":1}',
        "semicolon": '{"model":"alice";"max_tokens":1}',
        "equals sign": '{"model"="alice"}',
        "arrow": '{"model"=>"alice"}',
        "no colon": '{"model" "alice"}',
        "two colons": '{"model"::"alice"}',
        "single quotes": "{'model':'alice'}",
        "single quotes, mixed": "{'model':'bob',\"model\":\"alice\"}",
        "no quotes": "{model:alice}",
        "no quotes, and quotes": '{model:"bob","model":"alice"}',
        "unclosed": '{"model":"alice"',
        "unclosed in params": '{"model":"alice","params":{"name":"search"}',
        "closed twice": '{"model":"alice"}}',
        "closed by a bracket": '{"model":"alice"]',
        "not opened": '"model":"alice"}',
        "trailing text": '{"model":"alice"}x',
        "trailing NUL": '{"model":"alice"}\x00',
        "trailing NULs and text": '{"model":"alice"}\x00\x00bob',
        "trailing spaces": '{"model":"alice"}   \n\n',
        "trailing form feed": '{"model":"alice"}\x0c',
        "trailing vertical tab": '{"model":"alice"}\x0b',
        "trailing no-break space": raw('{"model":"alice"}\xa0'),
        "trailing BOM": raw('{"model":"alice"}\ufeff'),
        "trailing comma after": '{"model":"alice"},',
        "two documents": '{"model":"alice"}{"model":"bob"}',
        "two lines": '{"model":"alice"}\n{"model":"bob"}\n',
        "second document": 'null{"model":"bob"}',
        "leading text": 'x{"model":"alice"}',
        "leading NUL": '\x00{"model":"alice"}',
        "leading form feed": '\x0c{"model":"alice"}',
        "leading vertical tab": '\x0b{"model":"alice"}',
        "leading no-break space": raw('\xa0{"model":"alice"}'),
        "leading XSSI prefix": ')]}\',\n{"model":"alice"}',
        "leading while": 'while(1);{"model":"alice"}',
        "in parentheses": '({"model":"alice"})',
        "callback": 'f({"model":"alice"})',
        "no-break space inside": raw('{\xa0"model":"alice"}'),
        "form feed inside": '{\x0c"model":"alice"}',
        "NUL inside": '{\x00"model":"alice"}',
        "record separator": '\x1e{"model":"alice"}\n',
        "YAML": "model: alice\nmax_tokens: 1000\n",
        "XML": "<call><model>alice</model></call>",
        "data URL": 'data:application/json,{"model":"alice"}',
        "SSE": 'data: {"model":"alice"}\n\n',
    }.items():
        add(f"syntax: {shown}", text)


def add_roots(add):
    for shown, text in {
        "batch of one": f"[{PLAIN}]",
        "batch of two": '[{"method":"tools/list"},{"method":"tools/call","params":{"name":"search"}}]',
        "empty list": "[]",
        "pairs": '[["model","alice"]]',
        "text": '"model"',
        "document in a text": r'"{\"model\":\"alice\"}"',
        "number": "5",
        "null": "null",
        "true": "true",
        "spaces only": "  \n",
    }.items():
        add(f"root: {shown}", text)


def add_encodings(add):
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        bom = "\ufeff".encode(encoding)
        charset = encoding.rsplit("-", 1)[0]
        for shown, start in (("", b""), (" with BOM", bom)):
            text = text_of(start + with_model('"alice"').encode(encoding))
            add(f"encoding: {encoding}{shown}", text)
            add(f"encoding: {encoding}{shown}, charset={charset}", text, f"{JSON}; charset={charset}")
            add(
                f"encoding: {encoding}{shown}, charset={charset}{encoding[-2:]}",
                text,
                f"{JSON}; charset={charset}{encoding[-2:]}",
            )
    for charset in (
        "utf-16",
        "utf-16le",
        "utf-16be",
        "utf-32",
        "utf-7",
        "iso-8859-1",
        "latin1",
        "ascii",
        "windows-1252",
        "ibm037",
        "utf8",
        "UTF-8",
        '"utf-8"',
        "utf-8,utf-16",
        "utf-8; charset=utf-16",
        "x",
        "",
        "utf-8 ",
        "none",
        "unicode-1-1-utf-8",
    ):
        add(f"encoding: UTF-8, charset={charset}", PLAIN, f"{JSON}; charset={charset}")
        add(f"encoding: an é, charset={charset}", raw(with_model('"é"')), f"{JSON}; charset={charset}")
    utf7 = '{"mod+AGU-l":"+AGEAbABpAGM-e"}'
    add("encoding: UTF-7, charset=utf-7", utf7, f"{JSON}; charset=utf-7")
    add("encoding: UTF-7, model twice", '{"model":"bob","mod+AGU-l":"alice"}', f"{JSON}; charset=utf-7")
    add("encoding: UTF-7", utf7)
    add("encoding: EBCDIC, charset=ibm037", text_of(with_model('"alice"').encode("cp037")), f"{JSON}; charset=ibm037")
    bom = "\xef\xbb\xbf"
    add("encoding: BOM", bom + PLAIN)
    add("encoding: BOM, charset=utf-8", bom + PLAIN, f"{JSON}; charset=utf-8")
    add("encoding: two BOMs", bom * 2 + PLAIN)
    add("encoding: BOM after a space", " " + bom + PLAIN)
    add("encoding: half a BOM", "\xef\xbb" + PLAIN)
    add("encoding: only a BOM", bom)
    for shown, data in {
        "latin-1": "caf\xe9",
        "byte 0xFF": "alice\xff",
        "byte 0x80": "alice\x80",
        "cut-off sequence": "alice\xc3",
        "overlong a": "\xc1\xa1lice",
        "overlong a, three bytes": "\xe0\x81\xa1lice",
        "overlong NUL": "alice\xc0\x80",
        "UTF-8 of a surrogate": "alice\xed\xa0\x80",
        "CESU-8 pair": "\xed\xa0\xbd\xed\xb8\x80",
        "above U+10FFFF": "alice\xf4\x90\x80\x80",
        "five bytes": "alice\xf8\x88\x80\x80\x80",
    }.items():
        add(f"encoding: {shown}", f'{{"model":"{data}"}}')
        add(f"encoding: {shown}, elsewhere", f'{{"x":"{data}","model":"alice"}}')
    add("encoding: overlong quote", '{"x":"\xc0\xa2,\xc0\xa2model\xc0\xa2:\xc0\xa2bob","model":"alice"}')
    add("encoding: overlong in a name", '{"mod\xc1\xa5l":"alice","model":"bob"}')
    for coding, data in {
        "gzip": gzip.compress(PLAIN.encode(), mtime=0),
        "deflate": zlib.compress(PLAIN.encode()),
        "deflate, raw": zlib.compress(PLAIN.encode())[2:-4],
    }.items():
        header = {"content-encoding": coding.split(",")[0]}
        add(f"encoding: {coding}", text_of(data), headers=header)
        add(f"encoding: {coding}, but plain", PLAIN, headers=header)
    add("encoding: gzip without its header", text_of(gzip.compress(PLAIN.encode(), mtime=0)))
    for coding in ("identity", "Identity", "", "x-gzip", "br", "identity, identity", "none", "utf-8"):
        add(f"encoding: plain, content-encoding {coding!r}", PLAIN, headers={"content-encoding": coding})
    add("encoding: Content-Transfer-Encoding base64", PLAIN, headers={"content-transfer-encoding": "base64"})
    add("chunked", PLAIN, is_chunked=True)
    add("chunked, model twice", '{"model":"alice","model":"bob"}', is_chunked=True)
    add("chunked, form", "model=alice", FORM, is_chunked=True)


def add_content_types(add):
    for kind in (
        None,
        "",
        "application/json;",
        "application/json; profile=x",
        'application/json; profile="a; charset=utf-16"',
        "application/json;odata=verbose",
        "APPLICATION/JSON",
        "application/json ; charset=utf-8",
        "application/vnd.api+json",
        "application/ld+json",
        "application/json-patch+json",
        "application/problem+json",
        "application/json-rpc",
        "application/jsonrequest",
        "application/x-json",
        "application/json5",
        "application/x-ndjson",
        "application/jsonl",
        "application/json-seq",
        "application/+json",
        "text/json",
        "text/x-json",
        "text/plain",
        "text/plain; charset=utf-8",
        "text/html",
        "text/javascript",
        "application/javascript",
        "application/octet-stream",
        "application/xml",
        "*/*",
        "application/*",
        "json",
        "application/json, text/plain",
        "text/plain, application/json",
        "application/x-www-form-urlencoded, application/json",
        "application/jsonx",
        "image/svg+json",
        "application/vnd.x+json; charset=utf-16",
        "application / json",
        "application/json/",
        "application/json\t",
        "application/xml+json",
        "multipart/form-data",
        "multipart/mixed",
        "application/cbor",
        "application/graphql+json",
        "application/vnd.x+JSON",
    ):
        add(f"type: {kind}", PLAIN, kind)
    for first, second in (
        (JSON, FORM),
        (FORM, JSON),
        (JSON, "text/plain"),
        ("text/plain", JSON),
        (JSON, f"{JSON}; charset=utf-16"),
    ):
        add(f"type: {first}, then {second}", PLAIN, first, headers={"Content-Type": second})
    add(f"type: {JSON}, then {FORM}, form", "model=alice", JSON, headers={"Content-Type": FORM})
    add(f"type: {FORM}, then {JSON}, form", "model=alice", FORM, headers={"Content-Type": JSON})
    add("type: JSON as a form", PLAIN, FORM)
    add("type: JSON as a form, after model=", "model=bob&x=1\n" + PLAIN, FORM)
    add("type: JSON as a form, after a comment", "//&model=bob&x=1\n" + PLAIN, FORM)
    add("type: JSON as a form, in a comment", '{"model":"alice"/*&model=bob&*/}', FORM)
    add("type: JSON as a form, with =", '{"model":"alice","x":"="}', FORM)
    add("type: JSON as a form, with model=", '{"model":"alice","x":"&model=bob&"}', FORM)
    add("type: JSON as a form with BOM", "\xef\xbb\xbf" + PLAIN, FORM)
    add("type: JSON as a form with space", "\n " + PLAIN, FORM)
    add("type: JSON in UTF-16 as a form", text_of(with_model('"alice"').encode("utf-16")), FORM)
    add("type: batch as a form", f"[{PLAIN}]", FORM)
    add("type: JSON as multipart", PLAIN, MULTIPART)
    add("type: form as JSON", "model=alice&max_tokens=1000", JSON)
    add("type: form as text/plain", "model=alice&max_tokens=1000", "text/plain")
    add("type: form without type", "model=alice&max_tokens=1000", None)


def add_forms(add):
    for shown, text in {
        "plain": "model=alice&method=tools%2Fcall&max_tokens=1000",
        "empty": "",
        "twice": "model=alice&model=bob",
        "twice, equal": "model=alice&model=alice",
        "twice, escaped": "model=alice&%6dodel=bob",
        "escaped name": "%6d%6Fdel=alice",
        "escaped value": "model=%61lice",
        "plus": "model=al+ice",
        "escaped plus": "model=al%2Bice",
        "escaped space": "model=al%20ice",
        "Model": "Model=alice",
        "MODEL and model": "MODEL=alice&model=bob",
        "brackets": "model[]=alice",
        "brackets and model": "model=bob&model[]=alice",
        "index": "model[0]=alice",
        "index, twice": "model[0]=alice&model[1]=bob",
        "object": "model[a]=alice",
        "object and model": "model=bob&model[a]=alice",
        "bracket first": "[model]=alice",
        "bracket open": "model[=alice",
        "escaped brackets": "model%5B%5D=alice",
        "escaped brackets and model": "model=bob&model%5B%5D=alice",
        "dot": "max.tokens=1000",
        "space in the name": "max+tokens=1000",
        "dot and max_tokens": "max_tokens=1&max.tokens=1000",
        "dash": "max-tokens=1000",
        "nested": "params[name]=search",
        "nested, escaped": "params%5Bname%5D=search",
        "nested, dot": "params.name=search",
        "nested, twice": "params[name]=search&params[name]=delete",
        "semicolon": "a=1;model=alice",
        "semicolon, model first": "model=alice;a=1",
        "newline": "a=1\nmodel=alice",
        "CRLF": "model=alice\r\n",
        "no value": "model",
        "empty value": "model=",
        "two equals": "model=alice=bob",
        "ampersands": "&&model=alice&&",
        "escaped ampersand": "a=1%26model=alice",
        "HTML ampersand": "a=1&amp;model=alice",
        "question mark": "?model=alice",
        "fragment": "model=alice#x",
        "space before": " model=alice",
        "plus before": "+model=alice",
        "escaped space before": "%20model=alice",
        "space after the name": "model =alice",
        "space around the value": "model= alice ",
        "escaped NUL": "model=alice%00",
        "escaped NUL in the name": "model%00x=alice",
        "escaped NUL in the name and model": "model=bob&model%00x=alice",
        "NUL": "model=alice\x00",
        "bad escape": "model=%zzalice",
        "bad escape at the end": "model=alice%",
        "short escape": "model=alice%4",
        "escape %u": "model=%u0061lice",
        "bad escape in the name": "mod%el=alice",
        "bad escape elsewhere": "a=%zz&model=alice",
        "bad escape of a name elsewhere": "%zz=1&model=alice",
        "invalid UTF-8": "model=alice%FF",
        "invalid UTF-8, raw": "model=alice\xff",
        "invalid UTF-8 elsewhere": "a=%FF&model=alice",
        "latin-1": "model=caf%E9",
        "UTF-8": "model=caf%C3%A9",
        "UTF-8, raw": raw("model=café"),
        "overlong": "model=%C1%A1lice",
        "BOM": "\xef\xbb\xbfmodel=alice",
        "escaped BOM": "%EF%BB%BFmodel=alice",
        "_charset_": "_charset_=iso-8859-1&model=caf%C3%A9",
        "utf8 mark": "utf8=%E2%9C%93&model=alice",
        "__proto__": "__proto__[model]=alice",
        "lookup order": "a[model]=alice",
        "_method": "_method=PUT&method=tools/call",
        "double escape": "model=%2561lice",
        "equals sign escaped": "model%3Dalice",
        "quotes": 'model="alice"',
        "JSON value": 'model={"a":1}',
        "capital escape": "model=%C3%a9",
    }.items():
        add(f"form: {shown}", text, FORM)
    for kind in (
        f"{FORM}; charset=utf-8",
        f"{FORM};charset=iso-8859-1",
        f"{FORM}; charset=utf-16",
        FORM.upper(),
        f"{FORM}; x=y",
        "application/x-www-form-urlencoded-x",
        f"text/plain, {FORM}",
        f"{FORM};",
        f"{FORM}, {FORM}",
        f"{FORM}; charset=utf-7",
    ):
        add(f"form: type {kind}", "model=caf%C3%A9", kind)
    for number in (50, 200, 1000, 1100, 5000):
        add(f"form: after {number} fields", [["a=1&", number], "model=alice"], FORM)
        add(f"form: twice, after {number} fields", ["model=bob&", ["a=1&", number], "model=alice"], FORM)
    add("form: after 70 KiB", ["a=", ["x", 70000], "&model=alice"], FORM)
    add("form: long value", ["model=", ["x", 20000]], FORM)
    add("form: gzip", text_of(gzip.compress(b"model=alice", mtime=0)), FORM, headers={"content-encoding": "gzip"})

    def part(name, value, extra=""):
        return f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{extra}\r\n\r\n{value}\r\n'

    end = f"--{BOUNDARY}--\r\n"
    for shown, text in {
        "plain": part("model", "alice") + end,
        "twice": part("model", "alice") + part("model", "bob") + end,
        "file": part("model", "alice", '; filename="x"') + end,
        "JSON part": part("call", PLAIN, f"\r\ncontent-type: {JSON}") + end,
        "no end": part("model", "alice"),
        "preamble": "model=bob\r\n" + part("model", "alice") + end,
    }.items():
        add(f"multipart: {shown}", text, MULTIPART)
        add(f"multipart: {shown}, as a form", text, FORM)


def add_long(add):
    for depth in (50, 100, 127, 128, 129, 500, 512, 1000, 1001):
        add(f"nesting: {depth} lists", ['{"x":', ["[", depth], ["]", depth], ',"model":"alice"}'])
    add("nesting: 1000 objects", ['{"x":', ['{"x":', 1000], "1", ["}", 1000], ',"model":"alice"}'])
    add("nesting: 1000 objects with model", ['{"model":"alice","x":', ['{"model":"bob","x":', 1000], "1", ["}", 1001]])
    add("nesting: 100000 lists", ['{"model":"alice","x":', ["[", 100000], ["]", 100000], "}"])
    add("nesting: 100000 lists, not closed", [["[", 100000]])
    add("nesting: 100000 objects", [['{"a":', 100000], "1", ["}", 100000]])
    add("long: model after 60 KiB", ['{"x":"', ["y", 61000], '","model":"alice"}'])
    add("long: model after 70 KiB", ['{"x":"', ["y", 70000], '","model":"alice"}'])
    add("long: model before 70 KiB", ['{"model":"alice","x":"', ["y", 70000], '"}'])
    add("long: model after 70 KiB of spaces", [[" ", 70000], '{"model":"alice"}'])
    add("long: 70 KiB of spaces after", ['{"model":"alice"}', [" ", 70000]])
    add("long: text after 70 KiB of spaces", ['{"model":"alice"}', [" ", 70000], "x"])
    add("long: model of 10 KiB", ['{"model":"', ["a", 10240], '"}'])
    add("long: name of 10 KiB", ['{"', ["a", 10240], '":1,"model":"alice"}'])
    add("long: 10000 fields", ["{", ['"a":1,', 10000], '"model":"alice"}'])


if __name__ == "__main__":
    found = all_bodies()
    print(len(found), "bodies,", len(json.dumps([body.parts for body in found])), "bytes")
