//! What stands in a certificate, as far as it matters to us.

use std::net::{Ipv4Addr, Ipv6Addr};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::time::ASN1Time;

/// The names and the validity of one certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// DNS names that it is valid for, in lower case; `*.example.com` for all names one level below.
    pub dns_names: Vec<Box<str>>,
    pub subject: Subject,
    /// First and last second of its validity, since the Unix epoch.
    pub valid: (u64, u64),
}

/// Whom a certificate is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// Of the subject alternative names the first URI (a SPIFFE ID is one), else the first DNS name, else the first
    /// e-mail address, else the first IP address; as written in the certificate.
    pub san: Option<Box<str>>,
    /// The first common name, if it is a text (UTF-8, printable, numeric or IA5).
    pub cn: Option<Box<str>>,
}

impl Certificate {
    /// Reads a certificate.
    ///
    /// # Errors
    /// Words that say what is wrong with it.
    pub fn read(der: &[u8]) -> Result<Self, String> {
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
        let cn = certificate
            .subject()
            .iter_common_name()
            .next()
            .and_then(|name| name.as_str().ok());
        let valid = certificate.validity();
        Ok(Self {
            dns_names: dns_names.collect(),
            subject: Subject {
                san: alternative(names),
                cn: cn.map(Into::into),
            },
            valid: (since_epoch(valid.not_before), since_epoch(valid.not_after)),
        })
    }
}

/// When a list of revoked certificates should have been replaced, in seconds since the Unix epoch, if it says so.
///
/// # Errors
/// Words that say what is wrong with it.
pub(super) fn next_update(der: &[u8]) -> Result<Option<u64>, String> {
    let (_, list) = CertificateRevocationList::from_der(der).map_err(|error| error.to_string())?;
    Ok(list.next_update().map(since_epoch))
}

/// Nobody cares how long before 1970.
fn since_epoch(time: ASN1Time) -> u64 {
    u64::try_from(time.timestamp()).unwrap_or(0)
}

/// The most telling of several names.
fn alternative(names: &[GeneralName<'_>]) -> Option<Box<str>> {
    let ranked = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some((0, (*uri).into())),
        GeneralName::DNSName(name) => Some((1, (*name).into())),
        GeneralName::RFC822Name(address) => Some((2, (*address).into())),
        GeneralName::IPAddress(bytes) => Some((3, ip(bytes)?)),
        _ => None,
    });
    // The first among equals.
    ranked.min_by_key(|(rank, _)| *rank).map(|(_, name)| name)
}

fn ip(bytes: &[u8]) -> Option<Box<str>> {
    let v4 = <[u8; 4]>::try_from(bytes).map(|octets| Ipv4Addr::from(octets).to_string());
    let any = v4
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(|octets| Ipv6Addr::from(octets).to_string()));
    any.ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, date_time_ymd};

    fn certificate(sans: Vec<SanType>, cn: Option<&str>) -> Certificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(cn) = cn {
            params.distinguished_name.push(DnType::CommonName, cn);
        }
        params.subject_alt_names = sans;
        params.not_before = date_time_ymd(2026, 1, 1);
        params.not_after = date_time_ymd(2026, 1, 2);
        Certificate::read(
            params
                .self_signed(&KeyPair::generate().unwrap())
                .unwrap()
                .der(),
        )
        .unwrap()
    }

    #[test]
    fn the_most_telling_name_is_the_subject() {
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
            let read = certificate(sans, Some("Ann, \"the\" user"));
            assert_eq!(read.subject.san.as_deref(), expected);
            assert_eq!(read.subject.cn.as_deref(), Some("Ann, \"the\" user"));
        }
        assert_eq!(certificate(vec![], None).subject, Subject::default());
    }

    #[test]
    fn names_and_validity_are_read() {
        let dns =
            ["*.Example.com", "b.example"].map(|name| SanType::DnsName(name.try_into().unwrap()));
        let read = certificate(dns.to_vec(), None);
        assert_eq!(
            read.dns_names,
            ["*.example.com", "b.example"].map(Box::from)
        );
        assert_eq!(read.valid, (1_767_225_600, 1_767_312_000));
        assert!(Certificate::read(b"nonsense").is_err());
    }
}
