//! Certificates and private keys in PEM texts, and the certificate fields that the proxy uses.

use std::net::IpAddr;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::{self, CertificateError};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::time::ASN1Time;
use x509_parser::x509::X509Version;

/// Names and validity of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedCertificate {
    /// DNS names, in lower case. `*.example.com` covers all names one level below.
    pub dns_names: Vec<Box<str>>,
    pub subject: CertificateSubject,
    /// First and last second of validity, in seconds since the Unix epoch.
    pub validity_s: (u64, u64),
}

/// Subject of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateSubject {
    /// Preferred subject alternative name, as written in the certificate: the first URI (such as a
    /// SPIFFE ID), else the first DNS name, e-mail address or IP address.
    pub san: Option<Box<str>>,
    /// First common name, if it is a text (UTF-8, printable, numeric or IA5).
    pub cn: Option<Box<str>>,
}

/// Parses all certificates in a PEM text, at least one.
///
/// # Errors
/// Returns a message that describes the problem.
pub fn parse_certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("there is no PEM certificate in it".to_owned());
    }
    Ok(certificates)
}

/// Parses the private key in a PEM text.
///
/// # Errors
/// Returns a message that reveals nothing of the text.
pub fn parse_private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_hidden| {
        // The word stands in both encodings of an encrypted key: PKCS #8, and the older encoding
        // with a header above the key.
        let is_encrypted = pem.windows(9).any(|part| part == b"ENCRYPTED");
        let problem = if is_encrypted {
            "the private key is encrypted; expected one without a passphrase"
        } else {
            "there is no PEM private key in it"
        };
        problem.to_owned()
    })
}

impl ParsedCertificate {
    /// Parses a DER certificate.
    ///
    /// # Errors
    /// Returns a message that describes the problem.
    pub fn from_der(der: &[u8]) -> Result<Self, String> {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
        let names = match certificate.subject_alternative_name() {
            Ok(Some(extension)) => extension.value.general_names.as_slice(),
            Ok(None) => &[],
            Err(error) => return Err(error.to_string()),
        };
        let dns_names = names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(name.to_ascii_lowercase().into()),
            _ => None,
        });
        let cn = certificate.subject().iter_common_name().next();
        let cn = cn.and_then(|name| name.as_str().ok());
        let valid = certificate.validity();
        Ok(Self {
            dns_names: dns_names.collect(),
            subject: CertificateSubject {
                san: select_subject_alternative_name(names),
                cn: cn.map(Into::into),
            },
            validity_s: (
                to_unix_seconds(valid.not_before),
                to_unix_seconds(valid.not_after),
            ),
        })
    }
}

/// Verifies a certificate that is itself trusted: validity, purpose, and the name of a server;
/// `None` for a client.
///
/// Without alternative names, the common name counts, as in OpenSSL: the certificate is the
/// configured one, so the name only tells apart several configured servers.
pub(super) fn verify_trusted_certificate(
    der: &CertificateDer<'_>,
    now: UnixTime,
    name: Option<&ServerName<'_>>,
) -> Result<(), rustls::Error> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_error| CertificateError::BadEncoding)?;
    let valid = certificate.validity();
    if now.as_secs() < to_unix_seconds(valid.not_before) {
        return Err(CertificateError::NotValidYet.into());
    }
    if now.as_secs() > to_unix_seconds(valid.not_after) {
        return Err(CertificateError::Expired.into());
    }
    let usage = certificate
        .extended_key_usage()
        .map_err(|_error| CertificateError::BadEncoding)?;
    let is_allowed = usage.is_none_or(|usage| match name {
        Some(_) => usage.value.any || usage.value.server_auth,
        None => usage.value.any || usage.value.client_auth,
    });
    if !is_allowed {
        return Err(CertificateError::InvalidPurpose.into());
    }
    let Some(name) = name else { return Ok(()) };
    if !matches!(certificate.subject_alternative_name(), Ok(None)) {
        return verify_server_name(&der.try_into()?, name);
    }
    let mut common_names = certificate.subject().iter_common_name();
    let is_named = |own: &str| own.eq_ignore_ascii_case(&name.to_str());
    if common_names.any(|own| own.as_str().is_ok_and(is_named)) {
        return Ok(());
    }
    Err(CertificateError::NotValidForName.into())
}

/// Selects the issuers in the chain that a peer sent with its own certificate first: the
/// certificates of which each one is named as the issuer of the one before.
pub fn select_issuers<'c, 'd>(chain: &'c [CertificateDer<'d>]) -> &'c [CertificateDer<'d>] {
    let is_issued = |subject: &CertificateDer<'_>, issuer: &CertificateDer<'_>| {
        let subject = X509Certificate::from_der(subject);
        let issuer = X509Certificate::from_der(issuer);
        subject.is_ok_and(|(_, subject)| {
            issuer.is_ok_and(|(_, issuer)| subject.issuer().as_raw() == issuer.subject().as_raw())
        })
    };
    let (_, others) = chain.split_at_checked(1).unwrap_or_default();
    let pairs = chain.iter().zip(others);
    let count = pairs.take_while(|(one, next)| is_issued(one, next)).count();
    others.get(..count).unwrap_or_default()
}

/// The public key of a certificate of version 1. Returns `None` for later versions.
pub(super) fn read_version1_public_key(der: &[u8]) -> Option<SubjectPublicKeyInfoDer<'_>> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let is_version1 = certificate.version() == X509Version::V1;
    is_version1.then(|| certificate.tbs_certificate.subject_pki.raw.into())
}

/// Parses a certificate revocation list. Returns its next update in seconds since the Unix epoch,
/// if stated.
///
/// # Errors
/// Returns a message that describes the problem.
pub(super) fn parse_crl_next_update(der: &[u8]) -> Result<Option<u64>, String> {
    let (_, list) = CertificateRevocationList::from_der(der).map_err(|error| error.to_string())?;
    Ok(list.next_update().map(to_unix_seconds))
}

/// Converts a time to seconds since the Unix epoch. Times before 1970 become 0.
fn to_unix_seconds(time: ASN1Time) -> u64 {
    u64::try_from(time.timestamp()).unwrap_or(0)
}

/// Selects the preferred alternative name: URI, DNS name, e-mail address, then IP address.
fn select_subject_alternative_name(names: &[GeneralName<'_>]) -> Option<Box<str>> {
    let ranked = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some((0, (*uri).into())),
        GeneralName::DNSName(name) => Some((1, (*name).into())),
        GeneralName::RFC822Name(address) => Some((2, (*address).into())),
        GeneralName::IPAddress(bytes) => Some((3, format_ip_address(bytes)?)),
        _ => None,
    });
    // `min_by_key` returns the first of several names with equal rank.
    ranked.min_by_key(|(rank, _)| *rank).map(|(_, name)| name)
}

fn format_ip_address(bytes: &[u8]) -> Option<Box<str>> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let any = v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from));
    Some(any.ok()?.to_string().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, date_time_ymd};

    fn generate_parsed_certificate(sans: Vec<SanType>, cn: Option<&str>) -> ParsedCertificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(cn) = cn {
            params.distinguished_name.push(DnType::CommonName, cn);
        }
        params.subject_alt_names = sans;
        params.not_before = date_time_ymd(2026, 1, 1);
        params.not_after = date_time_ymd(2026, 1, 2);
        ParsedCertificate::from_der(
            params
                .self_signed(&KeyPair::generate().unwrap())
                .unwrap()
                .der(),
        )
        .unwrap()
    }

    #[test]
    fn subject_prefers_uri_then_dns_then_email_then_ip() {
        let dns = |name: &str| SanType::DnsName(name.try_into().unwrap());
        let (uri, mail) = ("spiffe://mesh/ns/a", "ann@example.com");
        let mail_san = || SanType::Rfc822Name(mail.try_into().unwrap());
        let ips = || {
            ["::1", "10.0.0.1"]
                .map(|ip| SanType::IpAddress(ip.parse().unwrap()))
                .to_vec()
        };
        let cases: [(Vec<SanType>, Option<&str>); 5] = [
            (
                vec![
                    mail_san(),
                    dns("A.example"),
                    SanType::URI(uri.try_into().unwrap()),
                ],
                Some(uri),
            ),
            (
                vec![mail_san(), dns("A.example"), dns("b.example")],
                Some("A.example"),
            ),
            ([ips(), vec![mail_san()]].concat(), Some(mail)),
            (ips(), Some("::1")),
            (vec![], None),
        ];
        for (sans, expected) in cases {
            let read = generate_parsed_certificate(sans, Some("Ann, \"the\" user"));
            assert_eq!(read.subject.san.as_deref(), expected);
            assert_eq!(read.subject.cn.as_deref(), Some("Ann, \"the\" user"));
        }
        assert_eq!(
            generate_parsed_certificate(vec![], None).subject,
            CertificateSubject::default()
        );
    }

    #[test]
    fn reads_dns_names_and_validity() {
        let dns =
            ["*.Example.com", "b.example"].map(|name| SanType::DnsName(name.try_into().unwrap()));
        let read = generate_parsed_certificate(dns.to_vec(), None);
        assert_eq!(
            read.dns_names,
            ["*.example.com", "b.example"].map(Box::from)
        );
        assert_eq!(read.validity_s, (1_767_225_600, 1_767_312_000));
        assert!(ParsedCertificate::from_der(b"nonsense").is_err());
    }
}
