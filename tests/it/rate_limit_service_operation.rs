//! The rate limit service in operation: health checks, listeners, logs, and its store.

use crate::support::h2_frames::{self, encode_frame};
use crate::support::prelude::*;
use crate::support::rls_client::messages::RateLimitResponse;
use crate::support::rls_client::messages::rate_limit_response::Code as LimitCode;
use crate::support::rls_client::{
    SHOULD_RATE_LIMIT, USER_POLICY, call_over_stream, call_unary, connect, encode_grpc_message,
};
use tokio::net::UnixStream;
use tonic::Code;

#[tokio::test]
async fn the_health_check_reports_serving_and_draining() {
    let mut service = ServiceClient::start(&format!(
        "[shutdown]\ndelay = '1h'\n{RLS_LISTENER}{USER_POLICY}"
    ))
    .await;
    let (serving, not_serving) = (1, 2);
    for known in [
        "",
        "envoy.service.ratelimit.v3.RateLimitService",
        "ratelimit",
    ] {
        assert_eq!(service.check_health(known).await, Ok(serving), "{known}");
    }
    assert_eq!(service.check_health("other").await, Err(Code::NotFound));
    let mark = service.proxy.log_mark();
    service.proxy.send_sigterm();
    service.proxy.wait_for_message("stopping", mark).await;
    // GOAWAY ends this connection: its client may cancel a call that it has not sent.
    let status = service.check_health("").await;
    assert!(
        [Ok(not_serving), Err(Code::Cancelled)].contains(&status),
        "{status:?}"
    );
    service.grpc = connect(service.address()).await;
    for known in ["", "ratelimit"] {
        let status = service.check_health(known).await;
        assert_eq!(status, Ok(not_serving), "a new connection, {known}");
    }
    // The service accepts calls until all clients have seen the status.
    service.expect_code(user_call("ann"), LimitCode::Ok).await;
}

#[tokio::test]
async fn tls_callers_must_present_a_client_certificate() {
    let (ca, others) = (CertificateAuthority::new(), CertificateAuthority::new());
    ca.sign("rls", "rls.internal");
    ca.sign("envoy", "envoy");
    others.sign("envoy", "envoy");
    let tls = format!(
        "[rls.tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\nclient_auth = 'require'\n",
        ca.path_string("rls.pem"),
        ca.path_string("rls.key"),
        ca.path_string("ca.pem")
    );
    let proxy = Proxy::setup(&format!("{RLS_LISTENER}{tls}{USER_POLICY}"))
        .start()
        .await;
    let address = proxy
        .logged_address("rate-limit service listening")
        .unwrap();
    let envoy = |signer: &CertificateAuthority| {
        TlsClient::with_certificate(&ca, signer, "envoy").with_alpn(&["h2"])
    };
    for expected in [LimitCode::Ok, LimitCode::Ok, LimitCode::OverLimit] {
        let stream = envoy(&ca).connect(address, "rls.internal").await.unwrap();
        assert_eq!(call_over_stream(stream).await, expected);
    }
    // With TLS 1.3 the client sees the rejection only when it reads.
    for (stranger, kind) in [
        (TlsClient::new(&ca).with_alpn(&["h2"]), "no_certificate"),
        (envoy(&others), "bad_certificate"),
    ] {
        if let Ok(stream) = stranger.connect(address, "rls.internal").await {
            let mut client = RawClient::from_stream(stream);
            client
                .send(
                    [
                        h2_frames::PREFACE,
                        &encode_frame(h2_frames::SETTINGS, 0, 0, []),
                    ]
                    .concat(),
                )
                .await;
            assert_eq!(client.read_first_bytes().await, Vec::<u8>::new(), "{kind}");
        }
        let series = format!("tidegate_tls_handshake_errors_total{{kind=\"{kind}\"}}");
        proxy.wait_for_metric(&series, 1.0).await;
    }
    let in_the_clear = RawClient::connect_and_send(address, h2_frames::PREFACE)
        .await
        .read_to_close()
        .await;
    assert!(
        !in_the_clear.is_empty(),
        "the server must reply with a TLS alert"
    );

    // Certificates are reloaded at run time.
    let old = fs::read(ca.path("rls.pem")).unwrap();
    let mark = proxy.log_mark();
    others.sign("rls", "rls.internal");
    for file in ["rls.key", "rls.pem"] {
        fs::copy(others.path(file), ca.path(file)).unwrap();
    }
    assert_ne!(fs::read(ca.path("rls.pem")).unwrap(), old);
    let line = proxy.wait_for_message("TLS settings changed", mark).await;
    assert_eq!(line.field("address"), address.to_string());
    assert!(
        envoy(&ca).connect(address, "rls.internal").await.is_err(),
        "another authority signed the new certificate"
    );
    let renewed = TlsClient::with_certificate(&others, &ca, "envoy").with_alpn(&["h2"]);
    let stream = renewed.connect(address, "rls.internal").await.unwrap();
    assert_eq!(
        call_over_stream(stream).await,
        LimitCode::OverLimit,
        "the counters must survive the certificate reload"
    );
}

#[tokio::test]
async fn calls_are_accepted_on_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("rls.sock");
    let config = format!(
        "[rls]\naddress = 'unix:{}'\n{USER_POLICY}",
        socket.display()
    );
    let file = ConfigFile::new(&config);
    let mut process = file.start(&[]);
    process.wait_for_text("\"listening\"").await;
    for expected in [LimitCode::Ok, LimitCode::Ok, LimitCode::OverLimit] {
        let answer = call_over_stream(UnixStream::connect(&socket).await.unwrap()).await;
        assert_eq!(answer, expected);
    }
    process.send_signal("TERM");
    assert!(process.wait_for_exit(TEST_TIMEOUT).await.status.success());
    assert!(!socket.exists(), "the socket file must be removed");
}

#[tokio::test]
async fn a_call_is_in_the_access_log_with_its_trace() {
    let config = format!("[log]\naccess = 'all'\n{RLS_LISTENER}{USER_POLICY}");
    let service = ServiceClient::start(&config).await;
    let mark = service.proxy.log_mark();
    let mut client = open_http2_connection(service.address()).await;
    let request = Request::post(format!("http://tidegate{SHOULD_RATE_LIMIT}"))
        .header("content-type", "application/grpc")
        .header(
            "traceparent",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        );
    let call = user_call("ann");
    let answered = await_response(
        client.send_request(
            request
                .body(Full::new(Bytes::from(encode_grpc_message(call))).boxed())
                .unwrap(),
        ),
    )
    .await;
    assert_eq!(answered.status(), 200);
    let line = service.proxy.wait_for_message("request", mark).await;
    line.expect_fields(&[("method", "RLS"), ("host", "edge")]);
    line.expect_fields(&[("path", "user=ann"), ("remaining", "1")]);
    assert_eq!(line.field("trace_id"), "4bf92f3577b34da6a3ce929d0e0e4736");
}

/// Without an upstream the process serves only the rate limit service.
#[tokio::test]
async fn the_service_runs_without_an_upstream() {
    let file = ConfigFile::new(&format!("{RLS_LISTENER}{USER_POLICY}"));
    let process = file.start(&[]);
    let address = process.wait_for_address("listening").await;
    let mut grpc = connect(address).await;
    let answer: RateLimitResponse = call_unary(&mut grpc, SHOULD_RATE_LIMIT, user_call("ann"))
        .await
        .unwrap();
    assert_eq!(answer.overall_code(), LimitCode::Ok);
}

/// Envoy then applies its own `failure_mode_deny`. A policy with `on_store_failure = "local"` keeps
/// deciding.
#[tokio::test]
async fn without_its_store_calls_are_unavailable_unless_a_policy_is_local() {
    let mut redis = RedisServer::start();
    let port = redis.port();
    let config = format!(
        "{RLS_LISTENER}[store]\nkind = 'redis'\n[store.redis]\nurl = 'redis://127.0.0.1:{port}/0'\nkey_prefix = 'test'\ninstances = 1\ntimeout = '1s'\n{USER_POLICY}[[policy]]\nname = 'path'\nmatch = {{ domain = 'edge', descriptors = {{ path = '*' }} }}\nlimit = {{ requests = 2, per = '1h' }}\non_store_failure = 'local'\n"
    );
    let mut service = ServiceClient::start(&config).await;
    service.proxy.wait_for_store().await;
    let (ann, path) = (user_descriptor("ann"), make_descriptor(&[("path", "/")]));
    assert_eq!(service.repeat_for_codes(&ann, 1).await, [LimitCode::Ok]);
    redis.kill();
    let away = service
        .should_rate_limit(single_descriptor_request(&ann))
        .await
        .unwrap_err();
    assert_eq!(away.code(), Code::Unavailable);
    assert_eq!(away.message(), "the store gave no answer");
    let answer = service.repeat_for_codes(&path, 3).await;
    assert_eq!(answer, admitted_then_over(2, 1));
    // One undecided descriptor makes the whole call unavailable.
    let both = service
        .should_rate_limit(make_request(&[path, ann.clone()]))
        .await
        .unwrap_err();
    assert_eq!(both.code(), Code::Unavailable);
    service
        .proxy
        .assert_metric("tidegate_rls_calls_total{result=\"unavailable\"}", 2.0)
        .await;
    redis.restart_async().await;
    wait_until("the decision", async || {
        service
            .should_rate_limit(single_descriptor_request(&ann))
            .await
            .is_ok()
    })
    .await;
}

/// Several processes share the counters.
#[tokio::test]
async fn a_limit_is_shared_through_redis() {
    let redis = RedisServer::start();
    let config = format!(
        "{}\n{RLS_LISTENER}{}",
        redis.store_config(),
        USER_POLICY.replace("requests = 2", "requests = 20")
    );
    let mut services = vec![
        ServiceClient::start(&config).await,
        ServiceClient::start(&config).await,
    ];
    for service in &services {
        service.proxy.wait_for_store().await;
    }
    let mut admitted = 0;
    for at in 0..30 {
        let answer = services[at % 2].ask_user("ann").await;
        admitted += usize::from(answer.overall_code() == LimitCode::Ok);
    }
    assert_eq!(admitted, 20);
}
