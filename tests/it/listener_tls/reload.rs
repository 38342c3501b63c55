//! TLS changes at run time: certificates, authorities, revocation lists, and TLS itself.

use super::{
    GET_REQUEST, assert_handshake_rejected, client_certificate, tls_config,
    wait_for_failed_handshakes,
};
use crate::support::prelude::*;
use rcgen::{SerialNumber, date_time_ymd};
use std::os::unix::fs::symlink;
use tokio_rustls::rustls::{HandshakeKind, version};

/// Whether new connections get a certificate signed by this authority.
async fn is_served_certificate_of(proxy: &Proxy, ca: &CertificateAuthority) -> bool {
    TlsClient::new(ca)
        .connect(proxy.address, "a.example")
        .await
        .is_ok()
}

async fn wait_for_certificate_of(proxy: &Proxy, ca: &CertificateAuthority) {
    wait_until("the new certificate", async || {
        is_served_certificate_of(proxy, ca).await
    })
    .await;
}

#[tokio::test]
async fn a_certificate_is_reloaded_when_it_matches_its_key() {
    let (ca, newer, newest) = (
        CertificateAuthority::with_certificate(),
        CertificateAuthority::with_certificate(),
        CertificateAuthority::with_certificate(),
    );
    let proxy = Proxy::with_echo(&tls_config(&ca, "")).await;
    let mut old = connect_tls_http1(&ca, &proxy).await;
    assert_eq!(old.request(GET_REQUEST).await.status, 200);
    let mark = proxy.log_mark();
    fs::copy(newer.path("a.pem"), ca.path("a.pem")).unwrap();
    proxy
        .wait_for_message("new configuration rejected", mark)
        .await;
    let line = proxy
        .wait_for_log("the reason", mark, TEST_TIMEOUT, |line| {
            line.message_starts_with("") && format!("{line:?}").contains("listen.tls.key")
        })
        .await;
    assert!(
        format!("{line:?}").contains("the key is not that of the certificate"),
        "{line:?}"
    );
    assert!(is_served_certificate_of(&proxy, &ca).await);
    assert!(!is_served_certificate_of(&proxy, &newer).await);
    fs::copy(newer.path("a.key"), ca.path("a.key")).unwrap();
    wait_for_certificate_of(&proxy, &newer).await;
    let status = old.request(GET_REQUEST).await.status;
    assert_eq!(status, 200, "the open connection stays open");

    // Renames a file over each of them, then sends a signal.
    for half in ["key", "pem"] {
        fs::copy(newest.path(&format!("a.{half}")), ca.path("next")).unwrap();
        fs::rename(ca.path("next"), ca.path(&format!("a.{half}"))).unwrap();
    }
    proxy.send_sighup();
    wait_for_certificate_of(&proxy, &newest).await;
}

#[tokio::test]
async fn a_secret_swap_under_load_fails_no_request() {
    let (one, two) = (
        CertificateAuthority::with_certificate(),
        CertificateAuthority::with_certificate(),
    );
    let mount = tempfile::tempdir().unwrap();
    let at = |name: &str| mount.path().join(name);
    for (version, ca) in [("..one", &one), ("..two", &two)] {
        fs::create_dir(at(version)).unwrap();
        for file in ["a.pem", "a.key"] {
            fs::copy(ca.path(file), at(version).join(file)).unwrap();
        }
    }
    symlink("..one", at("..data")).unwrap();
    for file in ["a.pem", "a.key"] {
        symlink(format!("..data/{file}"), at(file)).unwrap();
    }
    let config = format!(
        "[listen.tls]\ncert = {:?}\nkey = {:?}\n",
        at("a.pem"),
        at("a.key")
    );
    let proxy = Arc::new(Proxy::with_echo(&config).await);
    // A client that trusts both authorities.
    let mut both = fs::read_to_string(one.path("ca.pem")).unwrap();
    both += &fs::read_to_string(two.path("ca.pem")).unwrap();
    fs::write(one.path("both.pem"), both).unwrap();
    let client = TlsClient::with_roots_file(&one.path("both.pem"));
    let (stop, served) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let load: Vec<_> = (0..4)
        .map(|_| {
            let (proxy, client, stop, served) = (
                Arc::clone(&proxy),
                client.clone(),
                Arc::clone(&stop),
                Arc::clone(&served),
            );
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let mut client = client.connect_http1(proxy.address, "a.example").await;
                    for _ in 0..3 {
                        assert_eq!(client.request(GET_REQUEST).await.status, 200);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    wait_until("some requests", async || {
        served.load(Ordering::Relaxed) > 20
    })
    .await;
    symlink("..two", at("..data_tmp")).unwrap();
    fs::rename(at("..data_tmp"), at("..data")).unwrap();
    wait_for_certificate_of(&proxy, &two).await;
    let so_far = served.load(Ordering::Relaxed);
    wait_until("some more", async || {
        served.load(Ordering::Relaxed) > so_far + 20
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for client in load {
        client.await.unwrap();
    }
}

#[tokio::test]
async fn no_session_is_resumed_after_its_client_ca_changed() {
    let (ca, other) = (
        CertificateAuthority::with_certificate(),
        CertificateAuthority::with_certificate(),
    );
    ca.sign_params("ann", client_certificate("Ann", Vec::new()));
    fs::copy(ca.path("ca.pem"), ca.path("clients.pem")).unwrap();
    let text = format!(
        "client_ca = {:?}\nclient_auth = 'require'\n",
        ca.path_string("clients.pem"),
    );
    let config = tls_config(&ca, &text);
    let proxy = Proxy::with_echo(&config).await;
    for versions in [[&version::TLS13], [&version::TLS12]] {
        fs::copy(ca.path("ca.pem"), ca.path("clients.pem")).unwrap();
        let client = TlsClient::with_versions(&ca, &versions, Some((&ca, "ann")));
        let kind = async || {
            let mut stream = client
                .connect(proxy.address, "a.example")
                .await
                .map_err(|error| error.to_string())?;
            stream
                .write_all(GET_REQUEST.as_bytes())
                .await
                .unwrap_or_default();
            // Reading the response also reads the session tickets.
            let mut head = [0; 12];
            stream
                .read_exact(&mut head)
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(stream.get_ref().1.handshake_kind().unwrap())
        };
        wait_until("a resumed session", async || {
            kind().await == Ok(HandshakeKind::Resumed)
        })
        .await;
        // A policy change keeps the sessions valid.
        let mark = proxy.log_mark();
        proxy.write_config(&format!(
            "{config}[[policy]]\nname = 'p{mark}'\nmatch.path = '/p'\naction = 'deny'\n"
        ));
        proxy.wait_for_message("configuration reloaded", mark).await;
        assert_eq!(kind().await, Ok(HandshakeKind::Resumed));
        // A change of the authority does not.
        let mark = proxy.log_mark();
        fs::copy(other.path("ca.pem"), ca.path("clients.pem")).unwrap();
        proxy.wait_for_message("TLS settings changed", mark).await;
        let refused = kind().await.unwrap_err();
        assert!(refused.contains("alert"), "{refused}");
    }
}

#[tokio::test]
async fn no_session_is_resumed_with_an_expired_certificate() {
    let ca = CertificateAuthority::with_certificate();
    let mut brief = client_certificate("Ann", Vec::new());
    brief.not_after =
        date_time_ymd(1970, 1, 1) + Duration::from_secs(tidegate::clock::unix_time_s() + 3);
    ca.sign_params("ann", brief);
    let text = format!(
        "client_ca = {:?}\nclient_auth = 'require'\n",
        ca.path_string("ca.pem"),
    );
    let config = tls_config(&ca, &text);
    let proxy = Proxy::with_echo(&config).await;
    let client = TlsClient::with_certificate(&ca, &ca, "ann");
    let (mut is_resumed, deadline) = (false, Instant::now() + TEST_TIMEOUT);
    loop {
        assert!(
            Instant::now() < deadline,
            "the expired certificate is still accepted"
        );
        let mut stream = client.connect(proxy.address, "a.example").await.unwrap();
        stream
            .write_all(GET_REQUEST.as_bytes())
            .await
            .unwrap_or_default();
        if stream.read_exact(&mut [0; 12]).await.is_err() {
            break;
        }
        is_resumed = stream.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
        sleep(Duration::from_millis(20)).await;
    }
    assert!(is_resumed, "the session was resumed before the expiry");
    wait_for_failed_handshakes(&proxy, "bad_certificate", 1.0).await;
}

#[tokio::test]
async fn a_revoked_certificate_is_rejected_after_the_crl_changes() {
    let ca = CertificateAuthority::with_certificate();
    for (file, serial) in [("ann", 7), ("bob", 8)] {
        let mut params = client_certificate(file, Vec::new());
        params.serial_number = Some(SerialNumber::from(serial));
        ca.sign_params(file, params);
    }
    ca.write_revocation_list("crl.pem", &[7], 2100);
    let clients = format!(
        "client_ca = {:?}\nclient_auth = 'require'\nclient_crl = {:?}\n",
        ca.path_string("ca.pem"),
        ca.path_string("crl.pem")
    );
    let proxy = Proxy::with_echo(&tls_config(&ca, &clients)).await;
    let [ann, bob] = ["ann", "bob"].map(|file| TlsClient::with_certificate(&ca, &ca, file));
    assert_handshake_rejected(&proxy, &ann, "bad_certificate").await;
    let mut stream = bob.connect_http1(proxy.address, "a.example").await;
    assert_eq!(stream.request(GET_REQUEST).await.status, 200);
    let changes = async |serials: &[u64], until| {
        let mark = proxy.log_mark();
        ca.write_revocation_list("crl.pem", serials, until);
        proxy.wait_for_message("TLS settings changed", mark).await;
    };
    changes(&[7, 8], 2100).await;
    // Also with a session to resume.
    assert_handshake_rejected(&proxy, &bob, "bad_certificate").await;
    changes(&[8], 2100).await;
    let mut stream = ann.connect_http1(proxy.address, "a.example").await;
    assert_eq!(stream.request(GET_REQUEST).await.status, 200);
    // An outdated list may lack revoked certificates, so it is rejected.
    changes(&[], 2025).await;
    assert_handshake_rejected(&proxy, &ann, "bad_certificate").await;
    // So is a list of another authority.
    let mark = proxy.log_mark();
    let other = CertificateAuthority::with_certificate();
    other.write_revocation_list("crl.pem", &[], 2100);
    fs::copy(other.path("crl.pem"), ca.path("crl.pem")).unwrap();
    proxy.wait_for_message("TLS settings changed", mark).await;
    assert_handshake_rejected(&proxy, &ann, "bad_certificate").await;
    // An invalid file changes nothing.
    let mark = proxy.log_mark();
    fs::copy(ca.path("ca.pem"), ca.path("crl.pem")).unwrap();
    proxy
        .wait_for_message("new configuration rejected", mark)
        .await;
    assert_handshake_rejected(&proxy, &ann, "bad_certificate").await;
}

#[tokio::test]
async fn tls_can_be_enabled_and_disabled_by_reload() {
    let ca = CertificateAuthority::with_certificate();
    let proxy = Proxy::with_echo("").await;
    let mut plain = RawClient::connect(proxy.address).await;
    assert_eq!(plain.request(GET_REQUEST).await.status, 200);
    proxy.write_config(&tls_config(&ca, ""));
    wait_for_certificate_of(&proxy, &ca).await;
    let status = plain.request(GET_REQUEST).await.status;
    assert_eq!(status, 200, "the open connection stays open");
    let mark = proxy.log_mark();
    proxy.write_config("");
    proxy.wait_for_message("TLS was removed", mark).await;
    assert_eq!(proxy.get("/").await.status, 200);
}
