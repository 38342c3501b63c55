//! Certificates that are in the `ca` file themselves, as `openssl req -x509` makes them.

use crate::support::prelude::*;
use crate::support::tls::certificate_params;
use rcgen::{BasicConstraints, IsCa, date_time_ymd};

const LOOPBACK_SAN: [&str; 4] = ["-subj", "/CN=a", "-addext", "subjectAltName=IP:127.0.0.1"];

/// Starts a proxy for an HTTPS upstream with a certificate, and requests `/`. Returns the status
/// and the proxy.
async fn request_with(
    authority: &CertificateAuthority,
    file: &str,
    ca: &str,
    more: &str,
) -> (u16, Proxy) {
    let upstream = Upstream::echo().await;
    let address = authority.start_tls_front(file, upstream.address).await;
    let config = format!(
        "[upstream.tls]\nca = {:?}\n{more}\n",
        authority.path_string(ca)
    );
    let url = format!("https://{address}");
    let builder = Proxy::setup(&config).upstream(&url);
    let proxy = builder.start().await;
    (proxy.get("/").await.status, proxy)
}

#[tokio::test]
async fn an_upstream_certificate_in_the_ca_file_is_accepted() {
    let authority = CertificateAuthority::new();
    let not_ca = ["-addext", "basicConstraints=critical,CA:FALSE"];
    authority.self_sign("ca_true", &LOOPBACK_SAN);
    authority.self_sign("ca_false", &[&LOOPBACK_SAN[..], &not_ca].concat());
    authority.self_sign("name_only", &["-subj", "/CN=127.0.0.1"]);
    authority.sign("leaf", "127.0.0.1");
    for (file, more) in [
        ("ca_true", ""),
        ("ca_false", ""),
        ("name_only", ""),
        ("leaf", ""),
    ] {
        let (status, _) = request_with(&authority, file, &format!("{file}.pem"), more).await;
        assert_eq!(status, 200, "{file}");
    }
    // The file may hold further certificates.
    let files = ["leaf.pem", "ca_true.pem", "name_only.pem"];
    let pem = files.map(|file| fs::read_to_string(authority.path(file)).unwrap());
    fs::write(authority.path("all.pem"), pem.concat()).unwrap();
    for file in ["leaf", "ca_true", "name_only"] {
        let (status, _) = request_with(&authority, file, "all.pem", "").await;
        assert_eq!(status, 200, "{file}");
    }
}

#[tokio::test]
async fn a_certificate_in_the_ca_file_is_verified_and_the_error_names_the_remedy() {
    let authority = CertificateAuthority::new();
    authority.self_sign("other", &LOOPBACK_SAN);
    authority.self_sign("name_only", &["-subj", "/CN=localhost"]);
    authority.self_sign("good", &LOOPBACK_SAN);
    let client = ["-addext", "extendedKeyUsage=clientAuth"];
    authority.self_sign("client", &[&LOOPBACK_SAN[..], &client].concat());
    let mut expired = certificate_params("a", vec!["127.0.0.1".to_owned()]);
    expired.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    expired.not_before = date_time_ymd(2020, 1, 1);
    expired.not_after = date_time_ymd(2021, 1, 1);
    authority.sign_params("expired", expired);
    let server_name = "server_name = 'other.example'";
    for (file, ca, more, remedy) in [
        ("good", "other.pem", "", "or with this certificate itself"),
        ("name_only", "name_only.pem", "", "-addext subjectAltName"),
        ("good", "good.pem", server_name, "set server_name"),
        (
            "expired",
            "expired.pem",
            "",
            "renew the server's certificate",
        ),
        ("client", "client.pem", "", "extendedKeyUsage=serverAuth"),
    ] {
        let (status, proxy) = request_with(&authority, file, ca, more).await;
        assert_eq!(status, 502, "{file}");
        let names_remedy = |line: &LogLine| line.contains(remedy);
        proxy
            .wait_for_log(remedy, 0, TEST_TIMEOUT, names_remedy)
            .await;
    }
}

/// The configuration of a Redis with a limit of one request, and `doctor`'s report about it.
async fn use_redis(server: &RedisServer, lines: &str) -> (Vec<u16>, String) {
    let config = format!(
        "[store]\nkind = 'redis'\n[store.redis]\nurl = 'rediss://127.0.0.1:{}/0'\ntimeout = '5s'\nkey_prefix = 'test'\n{lines}\n\
         [[policy]]\nname = 'p'\nkey = ['client_ip']\nlimit = {{ requests = 1, per = '1h' }}\non_store_failure = 'open'\n",
        server.tls_port()
    );
    let proxy = Proxy::with_echo(&config).await;
    let mut command = tidegate_command();
    let command = command
        .args(["doctor", "--config"])
        .arg(proxy.config_path());
    let report = run_command(command).await.stdout;
    let words: Vec<_> = report.split_whitespace().collect();
    (proxy.get_statuses("/", 2).await, words.join(" "))
}

#[tokio::test]
async fn a_redis_certificate_in_the_ca_file_is_accepted() {
    let authority = CertificateAuthority::new();
    for (file, is_version1) in [("server", false), ("server", true)] {
        match is_version1 {
            false => authority.self_sign(file, &LOOPBACK_SAN),
            true => authority.self_sign_version1(file, "/CN=127.0.0.1"),
        }
        let server = RedisServer::start_with_tls(&authority, &["--tls-auth-clients", "no"]);
        let ca_line = format!("ca = {:?}", authority.path_string("server.pem"));
        let (statuses, report) = use_redis(&server, &ca_line).await;
        assert_eq!(statuses, [200, 429], "version 1: {is_version1}: {report}");
        assert!(!report.contains("(tls)"), "{report}");
        let ca_line = format!("ca = {:?}", authority.path_string("ca.pem"));
        let (statuses, report) = use_redis(&server, &ca_line).await;
        assert_eq!(statuses, [200, 200]);
        assert!(
            report.contains("(tls)")
                && (report.contains("certificate itself")
                    || report.contains("name it in ca itself")),
            "{report}"
        );
    }
}

#[tokio::test]
async fn a_client_certificate_in_client_ca_is_accepted() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "a.example");
    authority.self_sign("ann", &["-subj", "/CN=ann"]);
    authority.self_sign("twin", &["-subj", "/CN=ann"]);
    let server_only = ["-subj", "/CN=bob", "-addext", "extendedKeyUsage=serverAuth"];
    authority.self_sign("bob", &server_only);
    let pem = ["ann.pem", "bob.pem"].map(|file| fs::read_to_string(authority.path(file)).unwrap());
    fs::write(authority.path("clients.pem"), pem.concat()).unwrap();
    let config = format!(
        "[listen.tls]\ncert = {:?}\nkey = {:?}\nclient_auth = 'require'\nclient_ca = {:?}\n",
        authority.path("server.pem"),
        authority.path("server.key"),
        authority.path("clients.pem"),
    );
    let proxy = Proxy::with_echo(&config).await;
    for (file, is_accepted) in [("ann", true), ("twin", false), ("bob", false)] {
        let client = TlsClient::with_certificate(&authority, &authority, file);
        let mut stream = client.connect(proxy.address, "a.example").await.unwrap();
        let request = "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n";
        let mut received = Vec::new();
        // In TLS 1.3 the server's refusal arrives after the client's handshake.
        drop(stream.write_all(request.as_bytes()).await);
        drop(in_time(stream.read_to_end(&mut received)).await);
        let received = String::from_utf8_lossy(&received);
        assert_eq!(
            received.starts_with("HTTP/1.1 200"),
            is_accepted,
            "{file}: {received}"
        );
    }
}
