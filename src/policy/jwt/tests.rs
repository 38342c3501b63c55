use super::*;
use http::HeaderValue;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PKCS_RSA_SHA256, PublicKeyData};
use serde_json::json;
use std::sync::LazyLock;

const NOW_S: u64 = 1_800_000_000;
const SECRET: &[u8] = b"a secret that is long enough to be one";

/// A signing key and its published JWK.
struct TestIssuer {
    jwk: Value,
    key: EncodingKey,
    /// The public key in DER.
    public: Vec<u8>,
}

impl TestIssuer {
    fn new(kid: &str, alg: Algorithm) -> Self {
        let kind = match alg {
            Algorithm::ES256 => &PKCS_ECDSA_P256_SHA256,
            Algorithm::EdDSA => &PKCS_ED25519,
            _ => &PKCS_RSA_SHA256,
        };
        let pair = KeyPair::generate_for(kind).unwrap();
        let der = pair.serialize_der();
        let key = match alg {
            Algorithm::ES256 => EncodingKey::from_ec_der(&der),
            // jsonwebtoken expects PKCS #8 (RFC 5208) without the public half.
            Algorithm::EdDSA => {
                let frame = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";
                EncodingKey::from_ed_der(&[&frame[..], &der[16..48]].concat())
            }
            // The RSA key inside PKCS #8 follows a frame of 26 bytes.
            _ => EncodingKey::from_rsa_der(&der[26..]),
        };
        let mut jwk = jsonwebtoken::jwk::Jwk::from_encoding_key(&key, alg).unwrap();
        jwk.common.key_id = Some(kid.into());
        Self {
            jwk: serde_json::to_value(jwk).unwrap(),
            key,
            public: pair.der_bytes().to_vec(),
        }
    }

    fn sign_token(&self, header: &Value, claims: &Value) -> String {
        let alg: Algorithm = header["alg"].as_str().unwrap().parse().unwrap();
        let message = format!(
            "{}.{}",
            encode_base64url(header.to_string()),
            encode_base64url(claims.to_string())
        );
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &self.key, alg).unwrap();
        format!("{message}.{signature}")
    }
}

fn encode_base64url(bytes: impl AsRef<[u8]>) -> String {
    const BASE64URL_ALPHABET: &[u8; 64] =
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for three in bytes.as_ref().chunks(3) {
        let all = three
            .iter()
            .fold(0_u32, |all, byte| all << 8 | u32::from(*byte))
            << (8 * (3 - three.len()));
        for place in 0..=three.len() {
            text.push(char::from(
                BASE64URL_ALPHABET[(all >> (18 - 6 * place)) as usize & 63],
            ));
        }
    }
    text
}

static RSA_ISSUER: LazyLock<TestIssuer> =
    LazyLock::new(|| TestIssuer::new("rsa", Algorithm::RS256));
static EC_ISSUER: LazyLock<TestIssuer> = LazyLock::new(|| TestIssuer::new("ec", Algorithm::ES256));
static ED25519_ISSUER: LazyLock<TestIssuer> =
    LazyLock::new(|| TestIssuer::new("ed", Algorithm::EdDSA));

fn keys_from_jwks(keys: &[Value]) -> VerificationKeys {
    VerificationKeys::from_jwks(&json!({ "keys": keys }).to_string(), false)
        .unwrap()
        .0
}

fn keys_only(keys: VerificationKeys) -> Option<Vec<TokenIssuer>> {
    Some(vec![TokenIssuer {
        name: None,
        audiences: Vec::new(),
        keys: keys.into(),
    }])
}

fn all_keys() -> VerificationKeys {
    keys_from_jwks(&[
        RSA_ISSUER.jwk.clone(),
        EC_ISSUER.jwk.clone(),
        ED25519_ISSUER.jwk.clone(),
    ])
}

const CLAIM_NAMES: [&str; 6] = [
    "sub",
    "plan",
    "/realm_access/roles",
    "level",
    "admin",
    "https://a.example/x",
];

fn make_reader(header: &str, issuers: Option<Vec<TokenIssuer>>) -> Arc<TokenReader> {
    let claims = CLAIM_NAMES
        .iter()
        .map(|name| ClaimName::parse(name).unwrap())
        .collect();
    Arc::new(TokenReader::new(
        Settings {
            header: header.parse().unwrap(),
            issuers,
        },
        claims,
    ))
}

fn make_headers(name: &str, value: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(
        name.parse::<HeaderName>().unwrap(),
        HeaderValue::from_str(value).unwrap(),
    );
    headers
}

/// The only text of a claim, as keys have it.
fn only_text(claim: Option<&[Box<str>]>) -> Option<String> {
    match claim {
        Some([only]) => Some(only.to_string()),
        _ => None,
    }
}

/// The `sub` claim as a key value, or the reason why the token is rejected.
fn subject_claim(
    reader: &Arc<TokenReader>,
    headers: &HeaderMap,
    now_s: u64,
) -> Result<Option<String>, TokenError> {
    let token = RequestToken::new(Some(reader), now_s);
    let sub = only_text(token.claim(headers, &ClaimName::parse("sub").unwrap()));
    match token.error() {
        Some(error) => {
            assert_eq!(sub, None);
            Err(error)
        }
        None => Ok(sub),
    }
}

fn subject_from_token(keys: VerificationKeys, token: &str) -> Result<Option<String>, TokenError> {
    let reader = make_reader("authorization", keys_only(keys));
    subject_claim(
        &reader,
        &make_headers("authorization", &format!("Bearer {token}")),
        NOW_S,
    )
}

fn ann_claims() -> Value {
    json!({ "sub": "ann" })
}

#[test]
fn accepts_tokens_signed_by_a_configured_key() {
    let ann = Ok(Some("ann".to_owned()));
    for (issuer, alg) in [
        (&*RSA_ISSUER, "RS256"),
        (&*EC_ISSUER, "ES256"),
        (&*ED25519_ISSUER, "EdDSA"),
    ] {
        let kid = issuer.jwk["kid"].clone();
        assert_eq!(
            subject_from_token(
                all_keys(),
                &issuer.sign_token(&json!({ "alg": alg, "kid": kid }), &self::ann_claims())
            ),
            ann,
            "{alg}"
        );
        let unnamed = issuer.sign_token(&json!({ "alg": alg }), &self::ann_claims());
        assert_eq!(
            subject_from_token(all_keys(), &unnamed),
            ann,
            "{alg} without kid"
        );
    }
    for alg in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
        let header = Header {
            kid: Some("any".into()),
            ..Header::new(alg)
        };
        let token = jsonwebtoken::encode(
            &header,
            &self::ann_claims(),
            &EncodingKey::from_secret(SECRET),
        )
        .unwrap();
        assert_eq!(
            subject_from_token(VerificationKeys::from_secret(SECRET).0, &token),
            ann,
            "{alg:?}"
        );
        let oct = json!({ "kty": "oct", "kid": "any", "k": encode_base64url(SECRET) });
        assert_eq!(
            subject_from_token(keys_from_jwks(&[oct]), &token),
            ann,
            "{alg:?} by JWK"
        );
    }
    // A key without `alg` accepts all algorithms of its type.
    let mut any = RSA_ISSUER.jwk.clone();
    any.as_object_mut().unwrap().remove("alg");
    for alg in ["RS512", "PS256"] {
        assert_eq!(
            subject_from_token(
                keys_from_jwks(std::slice::from_ref(&any)),
                &RSA_ISSUER.sign_token(&json!({ "alg": alg, "kid": "rsa" }), &self::ann_claims())
            ),
            ann
        );
    }
}

/// RFC 8725, sections 2.1 and 3.1: the key determines the algorithm.
#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn rejects_algorithm_confusion() {
    let hmac = |secret: &[u8], kid: Option<&str>| {
        let header = Header {
            kid: kid.map(str::to_owned),
            ..Header::new(Algorithm::HS256)
        };
        jsonwebtoken::encode(&header, &ann_claims(), &EncodingKey::from_secret(secret)).unwrap()
    };
    let pem = format!(
        "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
        encode_base64url(&RSA_ISSUER.public)
    );
    let n = RSA_ISSUER.jwk["n"].as_str().unwrap();
    let good = RSA_ISSUER.sign_token(&json!({ "alg": "RS256", "kid": "rsa" }), &ann_claims());
    let parts: Vec<&str> = good.split('.').collect();
    let token_with_header = |header: Value, signature: &str| {
        format!(
            "{}.{}.{signature}",
            encode_base64url(header.to_string()),
            encode_base64url(ann_claims().to_string())
        )
    };
    let untrusted_issuer = TestIssuer::new("rsa", Algorithm::RS256);
    let own_key = json!({ "alg": "RS256", "kid": "rsa", "jwk": untrusted_issuer.jwk, "jku": "https://evil.example/" });
    use TokenError::{InvalidSignature, Malformed, UnknownKey};
    for (what, token, error) in [
        (
            "HMAC with the public key's DER",
            hmac(&RSA_ISSUER.public, Some("rsa")),
            UnknownKey,
        ),
        (
            "HMAC with the public key's PEM",
            hmac(pem.as_bytes(), Some("rsa")),
            UnknownKey,
        ),
        (
            "HMAC with the modulus",
            hmac(n.as_bytes(), Some("rsa")),
            UnknownKey,
        ),
        (
            "HMAC with an empty secret, without kid",
            hmac(b"", None),
            UnknownKey,
        ),
        (
            "none",
            token_with_header(json!({ "alg": "none" }), ""),
            Malformed,
        ),
        (
            "None",
            token_with_header(json!({ "alg": "NoNe", "kid": "rsa" }), ""),
            Malformed,
        ),
        (
            "none, with a signature",
            token_with_header(json!({ "alg": "none", "kid": "rsa" }), parts[2]),
            Malformed,
        ),
        (
            "no algorithm",
            token_with_header(json!({ "kid": "rsa" }), parts[2]),
            Malformed,
        ),
        (
            "another algorithm of the same key",
            RSA_ISSUER.sign_token(&json!({ "alg": "RS384", "kid": "rsa" }), &ann_claims()),
            UnknownKey,
        ),
        (
            "another key's kid",
            RSA_ISSUER.sign_token(&json!({ "alg": "RS256", "kid": "ec" }), &ann_claims()),
            UnknownKey,
        ),
        (
            "an unknown kid",
            RSA_ISSUER.sign_token(&json!({ "alg": "RS256", "kid": "x" }), &ann_claims()),
            UnknownKey,
        ),
        (
            "an untrusted key with that kid",
            untrusted_issuer.sign_token(&json!({ "alg": "RS256", "kid": "rsa" }), &ann_claims()),
            InvalidSignature,
        ),
        (
            "an untrusted key embedded in the header",
            untrusted_issuer.sign_token(&own_key, &ann_claims()),
            InvalidSignature,
        ),
        (
            "no signature",
            format!("{}.{}.", parts[0], parts[1]),
            InvalidSignature,
        ),
        (
            "other claims",
            format!(
                "{}.{}.{}",
                parts[0],
                encode_base64url("{\"sub\":\"bob\"}"),
                parts[2]
            ),
            InvalidSignature,
        ),
        (
            "an extension",
            RSA_ISSUER.sign_token(
                &json!({ "alg": "RS256", "kid": "rsa", "crit": ["b64"], "b64": false }),
                &ann_claims(),
            ),
            Malformed,
        ),
        ("two parts", format!("{}.{}", parts[0], parts[1]), Malformed),
        ("four parts", format!("{good}.x"), Malformed),
        ("five parts", format!("{good}.x.y"), Malformed),
        ("no base64", "a.b.c".to_owned(), Malformed),
        (
            "padding",
            format!("{}=.{}.{}", parts[0], parts[1], parts[2]),
            Malformed,
        ),
        (
            "a list",
            RSA_ISSUER.sign_token(&json!({ "alg": "RS256" }), &json!(["sub", "ann"])),
            Malformed,
        ),
    ] {
        assert_eq!(subject_from_token(all_keys(), &token), Err(error), "{what}");
    }
    // An ECDSA signature of zeros (CVE-2022-21449).
    let zeros = token_with_header(
        json!({ "alg": "ES256", "kid": "ec" }),
        &encode_base64url([0; 64]),
    );
    assert_eq!(
        subject_from_token(all_keys(), &zeros),
        Err(InvalidSignature)
    );
    // A secret does not accept tokens of another secret.
    assert_eq!(
        subject_from_token(
            VerificationKeys::from_secret(b"another").0,
            &hmac(SECRET, None)
        ),
        Err(InvalidSignature)
    );
    assert_eq!(
        subject_from_token(VerificationKeys::from_secret(SECRET).0, &good),
        Err(UnknownKey)
    );
}

#[test]
fn ignores_keys_for_other_uses() {
    let changed = |change: Value| {
        let mut key = RSA_ISSUER.jwk.clone();
        for (name, value) in change.as_object().unwrap() {
            key[name] = value.clone();
        }
        key
    };
    let token = RSA_ISSUER.sign_token(&json!({ "alg": "RS256", "kid": "rsa" }), &ann_claims());
    for unfit in [
        json!({ "use": "enc" }),
        json!({ "key_ops": ["encrypt"] }),
        json!({ "alg": "RSA-OAEP" }),
        json!({ "alg": "ES256" }),
        json!({ "kty": "oct" }),
        json!({ "n": "AQAB" }),
        json!({ "n": "!" }),
    ] {
        let (keys, _) = VerificationKeys::from_jwks(
            &json!({ "keys": [changed(unfit.clone()), EC_ISSUER.jwk] }).to_string(),
            false,
        )
        .unwrap();
        assert_eq!(
            subject_from_token(keys, &token),
            Err(TokenError::UnknownKey),
            "{unfit}"
        );
    }
    for fit in [
        json!({ "use": "sig" }),
        json!({ "key_ops": ["verify"] }),
        json!({ "x5t": "abc" }),
    ] {
        assert_eq!(
            subject_from_token(keys_from_jwks(&[changed(fit)]), &token),
            Ok(Some("ann".into()))
        );
    }
}

#[test]
fn rejects_unusable_key_sets_without_revealing_their_content() {
    for text in [
        "",
        "hunter2",
        "[]",
        "{}",
        r#"{"keys":{}}"#,
        r#"{"keys":[]}"#,
        r#"{"keys":["hunter2"]}"#,
        r#"{"keys":[{"kty":"hunter2","k":"hunter2"}]}"#,
        r#"{"keys":[{"kty":"oct","k":"hunter2!"}]}"#,
        r#"{"keys":[{"kty":"oct","k":"","alg":"HS256"}]}"#,
        r#"{"keys":[{"kty":"EC","crv":"P-521","x":"hunter2","y":"hunter2"}]}"#,
        r#"{"keys":[{"kty":"EC","crv":"P-256","x":"AAAA","y":"AAAA"}]}"#,
    ] {
        let error = VerificationKeys::from_jwks(text, false).unwrap_err();
        assert!(
            !error.contains("hunter2") && error.contains("ke"),
            "{text}: {error}"
        );
    }
    // Each key that cannot be used would be a line in the log.
    let many = json!({ "keys": vec![0; 1_001] }).to_string();
    let error = VerificationKeys::from_jwks(&many, false).unwrap_err();
    assert!(error.contains("expected at most 1000"), "{error}");
    let mut private = EC_ISSUER.jwk.clone();
    private["d"] = json!("hunter2");
    let short = json!({ "kty": "oct", "k": "c2hvcnQ" });
    let (keys, warnings) =
        VerificationKeys::from_jwks(&json!({ "keys": [private, short] }).to_string(), false)
            .unwrap();
    assert!(
        warnings[0].contains("private") && warnings[1].contains("5 bytes"),
        "{warnings:?}"
    );
    let shown = format!("{keys:?}{:?}", VerificationKeys::from_secret(b"hunter2"));
    assert!(
        !shown.contains("hunter2") && !shown.contains("104, 117"),
        "{shown}"
    );
}

#[test]
fn validity_dates_have_a_leeway() {
    let read_error = |claims: Value| {
        subject_from_token(
            all_keys(),
            &EC_ISSUER.sign_token(&json!({ "alg": "ES256" }), &claims),
        )
        .err()
    };
    use TokenError::{Expired, InvalidDates, NotYetValid};
    for (dates, expected) in [
        (json!({}), None),
        (json!({ "exp": NOW_S + 1 }), None),
        (json!({ "exp": NOW_S }), None),
        (json!({ "exp": NOW_S - LEEWAY_S + 1 }), None),
        (json!({ "exp": NOW_S - LEEWAY_S }), Some(Expired)),
        (json!({ "exp": 0 }), Some(Expired)),
        (json!({ "exp": 1.5 }), Some(Expired)),
        (json!({ "exp": u64::MAX }), None),
        (json!({ "exp": 1e300 }), Some(InvalidDates)),
        (json!({ "exp": -1 }), Some(InvalidDates)),
        (json!({ "exp": "1900000000" }), Some(InvalidDates)),
        (json!({ "exp": null }), Some(InvalidDates)),
        (json!({ "nbf": NOW_S + LEEWAY_S }), None),
        (json!({ "nbf": NOW_S + LEEWAY_S + 1 }), Some(NotYetValid)),
        (json!({ "nbf": "x" }), Some(InvalidDates)),
        (json!({ "iat": "x" }), None),
    ] {
        assert_eq!(read_error(dates.clone()), expected, "{dates}");
    }
}

#[test]
fn cached_tokens_are_rejected_outside_their_validity_dates() {
    let reader = make_reader("authorization", keys_only(all_keys()));
    let token = EC_ISSUER.sign_token(
        &json!({ "alg": "ES256" }),
        &json!({ "sub": "ann", "exp": NOW_S, "nbf": NOW_S }),
    );
    let headers = make_headers("authorization", &format!("bearer {token}"));
    for (later_s, expected) in [
        (0, Ok(Some("ann".into()))),
        (29, Ok(Some("ann".into()))),
        (30, Err(TokenError::Expired)),
    ] {
        assert_eq!(subject_claim(&reader, &headers, NOW_S + later_s), expected);
    }
    assert_eq!(
        subject_claim(&reader, &headers, NOW_S - 31),
        Err(TokenError::NotYetValid),
        "the clock stepped back"
    );
}

#[test]
fn the_token_cache_is_bounded() {
    let reader = make_reader(
        "authorization",
        keys_only(VerificationKeys::from_secret(SECRET).0),
    );
    let present_token = |sub: &str| {
        let claims = json!({ "sub": sub });
        let token = jsonwebtoken::encode(
            &Header::default(),
            &claims,
            &EncodingKey::from_secret(SECRET),
        )
        .unwrap();
        assert_eq!(
            self::subject_claim(
                &reader,
                &make_headers("authorization", &format!("Bearer {token}")),
                NOW_S
            ),
            Ok(Some(sub.into()))
        );
    };
    let cached_tokens = || {
        reader
            .cache
            .0
            .iter()
            .map(|shard| shard.lock().len())
            .sum::<usize>()
    };
    for number in 0..CACHE_SHARD_COUNT * MAX_TOKENS_PER_SHARD + 3000 {
        present_token(&number.to_string());
    }
    assert_eq!(cached_tokens(), CACHE_SHARD_COUNT * MAX_TOKENS_PER_SHARD);
    present_token(&"x".repeat(MAX_CACHED_CLAIM_BYTES + 1));
    // Empty texts take memory too.
    let claims = json!({ "sub": vec![""; 2_000] });
    let key = EncodingKey::from_secret(SECRET);
    let token = jsonwebtoken::encode(&Header::default(), &claims, &key).unwrap();
    let headers = make_headers("authorization", &format!("Bearer {token}"));
    assert!(self::subject_claim(&reader, &headers, NOW_S).is_ok());
    let max_bytes = |shard: &Mutex<IndexMap<_, VerifiedToken, _>>| {
        shard
            .lock()
            .values()
            .map(|cached| cached.claims.memory_bytes())
            .max()
    };
    assert!(reader.cache.0.iter().filter_map(max_bytes).max() <= Some(MAX_CACHED_CLAIM_BYTES));
}

#[test]
fn finds_the_token_in_every_header_form() {
    let token = ED25519_ISSUER.sign_token(&json!({ "alg": "EdDSA" }), &ann_claims());
    let read_subject = |header: &str, value: &str| {
        subject_claim(
            &make_reader(header, keys_only(all_keys())),
            &make_headers(header, value),
            NOW_S,
        )
    };
    for scheme in ["Bearer ", "bearer ", "BEARER  ", "bEaReR\t", "  Bearer "] {
        assert_eq!(
            read_subject("authorization", &format!("{scheme}{token} ")),
            Ok(Some("ann".into())),
            "{scheme:?}"
        );
        assert_eq!(
            read_subject("x-jwt", &format!("{scheme}{token}")),
            Ok(Some("ann".into())),
            "{scheme:?}"
        );
    }
    assert_eq!(read_subject("x-jwt", &token), Ok(Some("ann".into())));
    for lenient in [&token, &format!("Basic {token}"), &format!("x {token}")] {
        let read = read_subject("authorization", lenient);
        assert_eq!(read, Ok(Some("ann".into())), "{lenient}");
    }
    for none in [
        "",
        "Bearer",
        "Bearer ",
        "Basic YTpi",
        &format!("Bearer{token}"),
        "DPoP x",
    ] {
        assert_eq!(read_subject("authorization", none), Ok(None), "{none}");
    }
    assert_eq!(
        read_subject("authorization", &format!("Bearer {token} {token}")),
        Err(TokenError::Malformed)
    );
    assert_eq!(
        read_subject(
            "authorization",
            &format!("Bearer {}", "x".repeat(MAX_TOKEN_BYTES))
        ),
        Err(TokenError::Malformed)
    );
    assert_eq!(
        read_subject(
            "authorization",
            &format!("Bearer {}", "x".repeat(MAX_TOKEN_BYTES + 1))
        ),
        Err(TokenError::TooLarge)
    );
    assert_eq!(
        subject_claim(
            &make_reader("authorization", keys_only(all_keys())),
            &HeaderMap::new(),
            NOW_S
        ),
        Ok(None)
    );
}

#[test]
fn a_token_is_ambiguous_if_its_header_repeats() {
    let reader = make_reader("authorization", keys_only(all_keys()));
    let is_ambiguous = |values: &[&'static str]| {
        let values = values.iter().map(|value| {
            let value = HeaderValue::from_static(value);
            (http::header::AUTHORIZATION, value)
        });
        reader.has_ambiguous_token(&values.collect())
    };
    assert!(!is_ambiguous(&[]));
    assert!(!is_ambiguous(&["Bearer a.b.c"]));
    assert!(is_ambiguous(&["Bearer a.b.c", "Bearer a.b.c"]));
    assert!(is_ambiguous(&["Basic YTpi", "Bearer a.b.c"]));
}

#[test]
fn claims_are_converted_to_texts() {
    let claims = json!({
        "sub": ["alone"], "plan": ["a", 7, true, null, {}, []], "realm_access": { "roles": ["x", "y"] },
        "level": 7.5, "admin": false, "https://a.example/x": { "y": 1 },
    });
    let token = EC_ISSUER.sign_token(&json!({ "alg": "ES256" }), &claims);
    let headers = make_headers("authorization", &format!("Bearer {token}"));
    let reader = make_reader("authorization", keys_only(all_keys()));
    let token = RequestToken::new(Some(&reader), NOW_S);
    let texts = CLAIM_NAMES.map(|name| {
        let claim = token.claim(&headers, &ClaimName::parse(name).unwrap());
        (
            claim.unwrap_or_default().join(" "),
            only_text(claim),
            claim.is_some(),
        )
    });
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(
        texts,
        [
            ("alone".to_owned(), some("alone"), true),
            ("a 7 true".to_owned(), None, true),
            ("x y".to_owned(), None, true),
            ("7.5".to_owned(), some("7.5"), true),
            ("false".to_owned(), some("false"), true),
            (String::new(), None, true),
        ]
    );
    assert_eq!(
        token.claim(&headers, &ClaimName::parse("unread").unwrap()),
        None
    );
    let without_reader = RequestToken::without_token_reader();
    assert_eq!(
        without_reader.claim(&headers, &ClaimName::parse("sub").unwrap()),
        None
    );
    for (number, text) in [
        (json!(42), "42"),
        (json!(-1.5), "-1.5"),
        (json!(u64::MAX), "18446744073709551615"),
    ] {
        let token = EC_ISSUER.sign_token(&json!({ "alg": "ES256" }), &json!({ "sub": number }));
        assert_eq!(
            subject_from_token(all_keys(), &token),
            Ok(Some(text.to_owned()))
        );
    }
    for wrong in ["", "/a~2"] {
        assert!(ClaimName::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn unverified_tokens_are_accepted_but_dates_are_checked() {
    let reader = make_reader("authorization", None);
    let read_subject = |token: &str| {
        subject_claim(
            &reader,
            &make_headers("authorization", &format!("Bearer {token}")),
            NOW_S,
        )
    };
    let encode_part = |json: Value| encode_base64url(json.to_string());
    for header in [
        "x".to_owned(),
        encode_part(json!({ "alg": "none" })),
        encode_part(json!({ "alg": "ES512", "kid": "?" })),
    ] {
        assert_eq!(
            read_subject(&format!("{header}.{}.", encode_part(ann_claims()))),
            Ok(Some("ann".into()))
        );
    }
    assert_eq!(
        read_subject(&format!(
            "x.{}.y",
            encode_part(json!({ "sub": "ann", "exp": 1 }))
        )),
        Err(TokenError::Expired)
    );
    for broken in [
        "x.y.z".to_owned(),
        encode_part(ann_claims()),
        format!("x.{}", encode_part(ann_claims())),
        format!("x.{}.y", encode_part(json!(1))),
        format!("x.y.{}.z", encode_part(ann_claims())),
    ] {
        assert_eq!(
            read_subject(&broken),
            Err(TokenError::Malformed),
            "{broken}"
        );
    }
}
