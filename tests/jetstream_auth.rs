//! Credentials and TLS on a real nats-server: every key of `[nats]`, wrong and right, and files that change.

mod jetstream;

use std::path::PathBuf;

use jetstream::{Rig, SOON, Site, message, stored};
use outboxd::jetstream::Settings;
use outboxd::ports::Link;
use outboxd::testbed::wait;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

const TOKEN: &str = "authorization { token: \"s3cr3t-token\" }";
const USER: &str = "authorization { user: app, password: \"s3cr3t-password\" }";

fn flows(settings: Settings) {
    let mut rig = Rig::up(settings);
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
}

fn is_refused(settings: Settings) {
    let rig = Rig::start(settings);
    rig.await_down("refuses the credentials of [nats]");
    let shown = format!("{:?}", rig.link());
    assert!(!shown.contains("s3cr3t") && !shown.contains("wrong-one"), "a secret is shown: {shown}");
}

#[test]
fn a_user_with_a_password_file() {
    let site = Site::with(USER);
    let mut settings = site.settings();
    settings.nats.user = "app".into();
    settings.nats.password_file = Some(site.file("password", "s3cr3t-password\n"));
    flows(settings.clone());
    settings.nats.password_file = Some(site.file("wrong", "wrong-one\n"));
    is_refused(settings);
    is_refused(site.settings());
}

#[test]
fn a_token_file() {
    let site = Site::with(TOKEN);
    let mut settings = site.settings();
    settings.nats.token_file = Some(site.file("token", "s3cr3t-token\n"));
    flows(settings.clone());
    settings.nats.token_file = Some(site.file("wrong", "wrong-one"));
    is_refused(settings);
}

#[test]
fn an_nkey_seed_file() {
    // a pair made for this test alone
    let (public, seed) = nkey();
    let site = Site::with(&format!("authorization {{ users: [ {{ nkey: {public} }} ] }}"));
    let mut settings = site.settings();
    settings.nats.nkey_seed_file = Some(site.file("seed", &format!("{seed}\n")));
    flows(settings.clone());
    let (_, other) = nkey();
    settings.nats.nkey_seed_file = Some(site.file("other", &other));
    is_refused(settings.clone());
    settings.nats.nkey_seed_file = Some(site.file("garbage", "no seed"));
    is_refused(settings);
}

#[test]
fn a_credentials_file() {
    let account = nkeys::KeyPair::new_account();
    let system = nkeys::KeyPair::new_account();
    let operator = nkeys::KeyPair::new_operator();
    let user = nkeys::KeyPair::new_user();
    let operator_jwt = jwt(&operator, &operator, "operator", r#"{"type":"operator","version":2}"#);
    let limits = r#"{"subs":-1,"data":-1,"payload":-1,"imports":-1,"exports":-1,"wildcards":true,"conn":-1,"leaf":-1,"mem_storage":-1,"disk_storage":-1,"streams":-1,"consumer":-1}"#;
    let account_jwt =
        jwt(&operator, &account, "account", &format!(r#"{{"type":"account","version":2,"limits":{limits}}}"#));
    let user_jwt = jwt(&account, &user, "user", r#"{"type":"user","version":2,"subs":-1,"data":-1,"payload":-1}"#);
    let system_jwt = jwt(&operator, &system, "system", r#"{"type":"account","version":2}"#);
    let conf = format!(
        "operator: {operator_jwt}\nsystem_account: {0}\nresolver: MEMORY\n\
         resolver_preload: {{ {0}: {system_jwt}, {1}: {account_jwt} }}",
        system.public_key(),
        account.public_key()
    );
    let site = Site::with(&conf);
    let seed = user.seed().expect("a seed");
    let creds = format!(
        "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    let mut settings = site.settings();
    settings.nats.credentials_file = Some(site.file("app.creds", &creds));
    flows(settings.clone());
    let path = site.file("broken.creds", "nothing of the kind");
    settings.nats.credentials_file = Some(path.clone());
    let rig = Rig::start(settings.clone());
    rig.await_down(&format!("nats.credentials_file {}", path.display()));
    drop(rig);
    let other = nkeys::KeyPair::new_account();
    let foreign = jwt(&other, &user, "user", r#"{"type":"user","version":2,"subs":-1,"data":-1,"payload":-1}"#);
    settings.nats.credentials_file = Some(site.file("foreign.creds", &creds.replace(&user_jwt, &foreign)));
    is_refused(settings);
}

#[test]
fn a_password_that_is_put_right_is_taken_without_a_restart() {
    let site = Site::with(USER);
    let mut settings = site.settings();
    settings.nats.user = "app".into();
    settings.nats.password_file = Some(site.file("password", "wrong-one"));
    let mut rig = Rig::start(settings);
    rig.await_down("refuses the credentials");
    // long enough for the pause between attempts to have grown
    let refusals = || site.server.log().matches("authentication error").count();
    wait::until("three refusals", SOON, || {
        let seen = refusals();
        if seen >= 3 { Ok(()) } else { Err(seen) }
    })
    .unwrap_or_else(|late| panic!("{late}"));
    site.file("password", "s3cr3t-password");
    rig.await_up();
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    assert!(refusals() <= 4, "it was tried {} times", refusals());
}

#[test]
fn a_secret_that_is_missing_is_named_and_then_taken() {
    let site = Site::with(TOKEN);
    let path = site.path().join("token");
    let mut settings = site.settings();
    settings.nats.token_file = Some(path.clone());
    let rig = Rig::start(settings);
    rig.await_down(&format!("nats.token_file {}: ", path.display()));
    site.file("token", "s3cr3t-token");
    rig.await_up();
}

#[test]
fn a_revoked_password_ends_the_link_and_the_new_one_is_read() {
    let mut site = Site::with(USER);
    let mut settings = site.settings();
    settings.nats.user = "app".into();
    settings.nats.password_file = Some(site.file("password", "s3cr3t-password"));
    let mut rig = Rig::up(settings);
    site.server.reconfigure("authorization { user: app, password: \"s3cr3t-second\" }").expect("reloaded");
    rig.await_down("");
    site.file("password", "s3cr3t-second");
    rig.await_up();
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
}

#[test]
fn tls_with_a_private_ca() {
    let pki = Pki::new();
    let site = Site::with(&pki.server(false));
    let mut settings = site.settings();
    settings.nats.tls.ca_file = Some(pki.path("ca.pem"));
    flows(settings.clone());
    let other = Pki::new();
    settings.nats.tls.ca_file = Some(other.path("ca.pem"));
    let rig = Rig::start(settings.clone());
    rig.await_down("certificate");
    drop(rig);
    settings.nats.tls.ca_file = Some(pki.path("absent.pem"));
    Rig::start(settings.clone()).await_down(&format!("nats.tls.ca_file {}", pki.path("absent.pem").display()));
    settings.nats.tls.ca_file = None;
    Rig::start(settings).await_down("certificate");
}

#[test]
fn tls_with_a_client_certificate() {
    let pki = Pki::new();
    let site = Site::with(&pki.server(true));
    let mut settings = site.settings();
    settings.nats.tls.ca_file = Some(pki.path("ca.pem"));
    settings.nats.tls.cert_file = Some(pki.path("client.pem"));
    settings.nats.tls.key_file = Some(pki.path("client.key"));
    flows(settings.clone());
    settings.nats.tls.key_file = None;
    Rig::start(settings.clone()).await_down("belong together");
    settings.nats.tls.cert_file = None;
    Rig::start(settings).await_down("");
}

#[test]
fn a_certificate_that_is_replaced_is_read_at_the_next_connect() {
    let pki = Pki::new();
    let mut site = Site::with(&pki.server(true));
    let other = Pki::new();
    for name in ["ca.pem", "client.pem", "client.key"] {
        std::fs::copy(other.path(name), site.path().join(name)).expect("copied");
    }
    let mut settings = site.settings();
    settings.nats.tls.ca_file = Some(site.path().join("ca.pem"));
    settings.nats.tls.cert_file = Some(site.path().join("client.pem"));
    settings.nats.tls.key_file = Some(site.path().join("client.key"));
    let rig = Rig::start(settings);
    rig.await_down("certificate");
    for name in ["ca.pem", "client.pem", "client.key"] {
        std::fs::copy(pki.path(name), site.path().join(name)).expect("copied");
    }
    rig.await_up();
    site.server.kill().expect("killed");
    rig.await_down("");
    site.server.resume().expect("started");
    rig.await_up();
}

#[test]
fn tls_before_the_first_word_of_the_server() {
    let pki = Pki::new();
    // in this mode the server speaks first where the client is silent, which is how the testbed greets it
    let mut site = Site::with(&pki.server_with("handshake_first: \"300ms\""));
    let mut settings = site.settings();
    settings.nats.tls.ca_file = Some(pki.path("ca.pem"));
    site.server.reconfigure(&pki.server_with("handshake_first: true")).expect("reloaded");
    wait::until("the reload", SOON, || {
        let log = site.server.log();
        if log.contains("Reloaded server configuration") { Ok(()) } else { Err(log) }
    })
    .unwrap_or_else(|late| panic!("{late}"));
    let rig = Rig::start(settings.clone());
    rig.await_down("cannot connect");
    drop(rig);
    settings.nats.tls.first = true;
    flows(settings);
}

#[test]
fn a_user_that_may_not_do_enough_is_told_what_is_missing() {
    let password = "password: \"s3cr3t-password\"";
    for (permissions, words) in [
        ("publish: { deny: \"$JS.API.STREAM.INFO.>\" }", "Permissions Violation for Publish to"),
        ("subscribe: { deny: \"_INBOX.>\" }", "allow it to subscribe to _INBOX.>"),
        ("publish: { deny: \"$JS.API.STREAM.CREATE.>\" }", "$JS.API.STREAM.CREATE"),
    ] {
        let site = Site::with(&format!(
            "authorization {{ users: [ {{ user: app, {password}, permissions: {{ {permissions} }} }} ] }}"
        ));
        let mut settings = site.settings();
        settings.nats.user = "app".into();
        settings.nats.password_file = Some(site.file("password", "s3cr3t-password"));
        Rig::start(settings).await_unusable(words);
    }
}

#[test]
fn another_configuration_is_connected_first_and_swapped_then() {
    let site = Site::with(TOKEN);
    let other = Site::with(USER);
    let mut settings = site.settings();
    settings.nats.token_file = Some(site.file("token", "s3cr3t-token"));
    let mut rig = Rig::up(settings.clone());
    assert_eq!(rig.send(1, message("a", "1", "{}")), stored(1));
    let before = rig.link();
    let mut wrong = other.settings();
    wrong.nats.user = "app".into();
    wrong.nats.password_file = Some(other.file("wrong", "wrong-one"));
    let error = rig.reconfigure(wrong.clone()).expect_err("refused");
    assert!(error.contains("refuses the credentials") && error.contains("the old one stays"), "{error}");
    let mut no_stream = settings.clone();
    no_stream.stream.name = "OTHER".into();
    no_stream.stream.subjects = vec!["orders.>".into()];
    let error = rig.reconfigure(no_stream).expect_err("refused");
    assert!(error.contains("subjects"), "{error}");
    assert_eq!(rig.link(), before, "nothing has changed");
    assert_eq!(rig.send(2, message("a", "2", "{}")), stored(2));

    // in flight at the old server while the new one takes over
    for ticket in 100..600 {
        rig.ship(ticket, message("b", &ticket.to_string(), "{}"));
    }
    let mut right = wrong;
    right.nats.password_file = Some(other.file("right", "s3cr3t-password"));
    rig.reconfigure(right).expect("taken");
    assert_eq!(rig.send(3, message("a", "3", "{}")), stored(1), "the first message of the other server");
    rig.await_reports(503);
    for ticket in 100..600 {
        assert_eq!(rig.outcome(ticket), stored(ticket - 97), "the old link finishes what it had");
    }
    let Link::Up { generation, .. } = rig.link() else { panic!("{:?}", rig.link()) };
    assert!(generation > 1, "{generation}");
}

/// A fresh user key: public part and seed.
fn nkey() -> (String, String) {
    let pair = nkeys::KeyPair::new_user();
    (pair.public_key(), pair.seed().expect("a seed"))
}

/// A JWT as NATS signs them (ed25519-nkey).
fn jwt(issuer: &nkeys::KeyPair, subject: &nkeys::KeyPair, name: &str, nats: &str) -> String {
    let header = encode(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let claims = format!(
        r#"{{"jti":"{name}","iat":1700000000,"iss":"{}","name":"{name}","sub":"{}","nats":{nats}}}"#,
        issuer.public_key(),
        subject.public_key()
    );
    let signed = format!("{header}.{}", encode(claims.as_bytes()));
    let signature = issuer.sign(signed.as_bytes()).expect("signed");
    format!("{signed}.{}", encode(&signature))
}

/// Base64 for URLs, without padding.
fn encode(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |word, b| word << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..=chunk.len() {
            text.push(char::from(ALPHABET[(word >> (18 - 6 * i)) as usize & 63]));
        }
    }
    text
}

/// A private certificate authority with one server and one client, in a folder of its own.
struct Pki {
    dir: tempfile::TempDir,
}

impl Pki {
    fn new() -> Self {
        let pki = Self { dir: tempfile::tempdir().expect("a folder") };
        let key = KeyPair::generate().expect("a key");
        let mut ca = CertificateParams::new(vec![]).expect("parameters");
        ca.distinguished_name.push(DnType::CommonName, "test ca");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        pki.write("ca.pem", &ca.self_signed(&key).expect("signed").pem());
        let issuer = Issuer::new(ca, key);
        pki.signed(&issuer, "server", &["127.0.0.1", "localhost"], ExtendedKeyUsagePurpose::ServerAuth);
        pki.signed(&issuer, "client", &[], ExtendedKeyUsagePurpose::ClientAuth);
        pki
    }

    fn signed(&self, issuer: &Issuer<'_, KeyPair>, name: &str, hosts: &[&str], usage: ExtendedKeyUsagePurpose) {
        let key = KeyPair::generate().expect("a key");
        let hosts: Vec<String> = hosts.iter().map(|h| (*h).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).expect("parameters");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages.push(usage);
        let cert = params.signed_by(&key, issuer).expect("signed");
        self.write(&format!("{name}.pem"), &cert.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    fn write(&self, name: &str, contents: &str) {
        std::fs::write(self.path(name), contents).expect("written");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The TLS block of a server; `verify` asks clients for a certificate.
    fn server(&self, verify: bool) -> String {
        self.server_with(&format!("verify: {verify}"))
    }

    fn server_with(&self, more: &str) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        let (cert, key, ca) = (path("server.pem"), path("server.key"), path("ca.pem"));
        format!("tls {{ cert_file: \"{cert}\", key_file: \"{key}\", ca_file: \"{ca}\", {more} }}")
    }
}
