//! Certificates, generated for each test, and TLS clients.

use super::client::ByteStream;
use super::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, IsCa, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber, date_time_ymd,
};
use std::io;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion, version,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A certificate authority with a directory for its files.
pub struct CertificateAuthority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl CertificateAuthority {
    pub fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let mut params = certificate_params("an authority", Vec::new());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(
            folder.path().join("ca.pem"),
            params.self_signed(&key).unwrap().pem(),
        )
        .unwrap();
        Self {
            folder,
            issuer: Issuer::new(params, key),
        }
    }

    /// An authority with a signed certificate `a` for a.example.
    pub fn with_certificate() -> Self {
        let ca = Self::new();
        ca.sign("a", "a.example");
        ca
    }

    /// Writes `<file>.pem` and `<file>.key`: a certificate for a name or an address.
    pub fn sign(&self, file: &str, name: &str) {
        self.sign_params(file, certificate_params(name, vec![name.to_owned()]));
    }

    /// As [`Self::sign`], for a certificate with these parameters.
    pub fn sign_params(&self, file: &str, params: CertificateParams) {
        let key = KeyPair::generate().unwrap();
        fs::write(
            self.path(&format!("{file}.pem")),
            params.signed_by(&key, &self.issuer).unwrap().pem(),
        )
        .unwrap();
        fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
    }

    /// An authority whose certificate, `ca.pem`, this one has signed.
    pub fn sign_authority(&self, name: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let mut params = certificate_params(name, Vec::new());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(folder.path().join("ca.pem"), certificate.pem()).unwrap();
        Self {
            folder,
            issuer: Issuer::new(params, key),
        }
    }

    /// Writes the revocation list `file` with these serial numbers, valid until the end of the year
    /// `until`.
    pub fn write_revocation_list(&self, file: &str, serials: &[u64], until: i32) {
        let revoked_certs = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(until, 12, 31),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(
            self.path(file),
            list.signed_by(&self.issuer).unwrap().pem().unwrap(),
        )
        .unwrap();
    }

    /// A server with the certificate of `file` that offers `protocols` and requires client
    /// certificates signed by `clients`.
    pub fn tls_acceptor(
        &self,
        file: &str,
        protocols: &[&str],
        clients: Option<&Self>,
    ) -> TlsAcceptor {
        let roots = |authority: &Self| {
            let mut roots = RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_file(authority.path("ca.pem")).unwrap())
                .unwrap();
            Arc::new(roots)
        };
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = clients.map(|authority| {
            let building = WebPkiClientVerifier::builder_with_provider(
                roots(authority),
                Arc::clone(&provider),
            );
            building.build().unwrap()
        });
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let config = match verifier {
            Some(verifier) => config.with_client_cert_verifier(verifier),
            None => config.with_no_client_auth(),
        };
        let certificate = CertificateDer::from_pem_file(self.path(&format!("{file}.pem"))).unwrap();
        let key = PrivateKeyDer::from_pem_file(self.path(&format!("{file}.key"))).unwrap();
        let mut config = config.with_single_cert(vec![certificate], key).unwrap();
        config.alpn_protocols = protocols
            .iter()
            .map(|protocol| protocol.as_bytes().to_vec())
            .collect();
        TlsAcceptor::from(Arc::new(config))
    }

    /// Starts a server with the certificate of `file` that forwards bytes to another server.
    pub async fn start_tls_front(&self, file: &str, server: SocketAddr) -> SocketAddr {
        let acceptor = self.tls_acceptor(file, &["http/1.1"], None);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut client) = acceptor.accept(socket).await else {
                        return;
                    };
                    let mut server = TcpStream::connect(server).await.unwrap();
                    tokio::io::copy_bidirectional(&mut client, &mut server)
                        .await
                        .ok();
                });
            }
        });
        address
    }

    /// Writes `<file>.pem` and `<file>.key`: a self-signed certificate by `openssl req -x509`, which
    /// makes it a certificate authority unless the arguments say otherwise.
    pub fn self_sign(&self, file: &str, args: &[&str]) {
        let [cert, key] = ["pem", "key"].map(|end| self.path_string(&format!("{file}.{end}")));
        let fixed = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
        run_openssl(
            &[
                &fixed.split(' ').collect::<Vec<_>>(),
                &["-keyout", &key, "-out", &cert][..],
                args,
            ]
            .concat(),
        );
    }

    /// As [`Self::self_sign`], for a certificate of version 1, which has no extensions.
    pub fn self_sign_version1(&self, file: &str, subject: &str) {
        let [cert, key, request] =
            ["pem", "key", "csr"].map(|end| self.path_string(&format!("{file}.{end}")));
        let fixed = "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj";
        let fixed: Vec<_> = fixed.split(' ').collect();
        run_openssl(&[&fixed, &[subject, "-keyout", &key, "-out", &request][..]].concat());
        run_openssl(&[
            "x509", "-req", "-in", &request, "-signkey", &key, "-days", "2", "-out", &cert,
        ]);
    }

    /// The path of one of the authority's files. `ca.pem` exists from the start.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// The table `listen.tls` with a signed certificate and its key.
    pub fn listen_tls(&self, name: &str) -> String {
        let (cert, key) = (
            self.path(&format!("{name}.pem")),
            self.path(&format!("{name}.key")),
        );
        format!("[listen.tls]\ncert = {cert:?}\nkey = {key:?}\n")
    }

    /// The same path as text, for arguments.
    pub fn path_string(&self, file: &str) -> String {
        self.path(file).to_str().unwrap().to_owned()
    }
}

fn run_openssl(args: &[&str]) {
    let output = std::process::Command::new("openssl").args(args).output();
    let output = output.expect("openssl is needed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
}

/// A client that trusts an authority.
#[derive(Clone)]
pub struct TlsClient(ClientConfig);

impl TlsClient {
    pub fn new(trusted: &CertificateAuthority) -> Self {
        Self::with_versions(trusted, &[&version::TLS13, &version::TLS12], None)
    }

    /// With a client certificate, possibly signed by another authority.
    pub fn with_certificate(
        trusted: &CertificateAuthority,
        signer: &CertificateAuthority,
        file: &str,
    ) -> Self {
        Self::with_versions(
            trusted,
            &[&version::TLS13, &version::TLS12],
            Some((signer, file)),
        )
    }

    pub fn with_versions(
        trusted: &CertificateAuthority,
        versions: &[&'static SupportedProtocolVersion],
        certificate: Option<(&CertificateAuthority, &str)>,
    ) -> Self {
        Self::build(&trusted.path("ca.pem"), versions, certificate)
    }

    /// A client that trusts all certificates in a file.
    pub fn with_roots_file(roots: &Path) -> Self {
        Self::build(roots, &[&version::TLS13, &version::TLS12], None)
    }

    fn build(
        trusted: &Path,
        versions: &[&'static SupportedProtocolVersion],
        certificate: Option<(&CertificateAuthority, &str)>,
    ) -> Self {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_file_iter(trusted).unwrap() {
            roots.add(root.unwrap()).unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        Self(match certificate {
            None => config.with_no_client_auth(),
            Some((signer, file)) => {
                let chain = CertificateDer::pem_file_iter(signer.path(&format!("{file}.pem")));
                let chain = chain.unwrap().collect::<Result<_, _>>().unwrap();
                let key =
                    PrivateKeyDer::from_pem_file(signer.path(&format!("{file}.key"))).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        })
    }

    /// The protocols it offers by ALPN, best first.
    pub fn with_alpn(mut self, protocols: &[&str]) -> Self {
        self.0.alpn_protocols = protocols
            .iter()
            .map(|protocol| protocol.as_bytes().to_vec())
            .collect();
        self
    }

    /// Connects to the server with this name or address. An address is not sent as SNI.
    pub async fn connect(
        &self,
        address: SocketAddr,
        name: &str,
    ) -> io::Result<TlsStream<TcpStream>> {
        let socket = TcpStream::connect(address).await?;
        self.handshake(socket, name).await
    }

    /// As [`Self::connect`], on an existing connection.
    pub async fn handshake<S: ByteStream>(
        &self,
        socket: S,
        name: &str,
    ) -> io::Result<TlsStream<S>> {
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let connector = TlsConnector::from(Arc::new(self.0.clone()));
        timeout(TEST_TIMEOUT, connector.connect(name, socket))
            .await
            .expect("the handshake did not finish in time")
    }

    /// Connects to the server with this name for HTTP/1.1.
    pub async fn connect_http1(&self, address: SocketAddr, name: &str) -> RawClient {
        RawClient::from_stream(
            self.connect(address, name)
                .await
                .unwrap_or_else(|error| panic!("{name}: {error}")),
        )
    }
}

/// Issuer and subject must have different names.
pub fn certificate_params(name: &str, valid_for: Vec<String>) -> CertificateParams {
    let mut params = CertificateParams::new(valid_for).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// A connection to a proxy with the certificate of [`CertificateAuthority::with_certificate`].
pub async fn connect_tls(trusted: &CertificateAuthority, proxy: &Proxy) -> TlsStream<TcpStream> {
    let client = TlsClient::new(trusted);
    client.connect(proxy.address, "a.example").await.unwrap()
}

/// As [`connect_tls`], for HTTP/1.1.
pub async fn connect_tls_http1(trusted: &CertificateAuthority, proxy: &Proxy) -> RawClient {
    RawClient::from_stream(connect_tls(trusted, proxy).await)
}
