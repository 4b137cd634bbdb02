use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use super::*;

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const REQUIRED: [(&str, &str); 2] =
    [("OBOL_REDIS_URL", "redis://u:hunter2@localhost:6379/0"), ("OBOL_CREDENTIAL_KEY", KEY)];

fn env<'a>(more: impl IntoIterator<Item = (&'a str, &'a str)>) -> Environment {
    Environment::new(REQUIRED.into_iter().chain(more))
}

fn names(problems: &Problems) -> Vec<&'static str> {
    problems.iter().map(Problem::name).collect()
}

#[test]
fn the_defaults_are_valid_and_those_of_the_reference() {
    let run = Loaded::run(&env([])).unwrap().config;
    assert_eq!(run.gateway.listen, "127.0.0.1:8080".parse().unwrap());
    assert_eq!(run.gateway.admin_listen, "127.0.0.1:8081".parse().unwrap());
    assert_eq!(run.gateway.session_ttl, Duration::from_secs(1800));
    assert_eq!(run.gateway.session_max_per_principal.get(), 1000);
    assert_eq!(run.gateway.key_ttl, Duration::from_secs(60));
    assert_eq!(run.gateway.drain_timeout, Duration::from_secs(30));
    assert_eq!(run.gateway.upstream_timeout, Duration::from_secs(300));
    assert_eq!(run.gateway.max_body_bytes, 4 * 1024 * 1024);
    assert_eq!((run.gateway.allowed_origins, run.gateway.allowed_hosts), (None, None));
    assert!(run.gateway.service_jwt.is_none());
    assert!(run.gateway.worker_threads.is_none());
    assert_eq!(run.redis_url.expose(), "redis://u:hunter2@localhost:6379/0");
}

#[test]
fn dev_needs_nothing() {
    assert!(Loaded::dev(&Environment::default()).is_ok());
}

#[test]
fn twelve_bad_values_are_reported_at_once_each_with_form_and_range() {
    let bad = [
        ("OBOL_LISTEN", "localhost", "IP:PORT"),
        ("OBOL_REDIS_URL", "http://hunter2@redis", "redis://"),
        ("OBOL_CREDENTIAL_KEY", "k1:aHVudGVyMg==", "BASE64"),
        ("OBOL_SESSION_TTL_S", "0", "1 to 604800 (default 1800)"),
        ("OBOL_SESSION_MAX_PER_PRINCIPAL", "many", "1 to 1000000 (default 1000)"),
        ("OBOL_KEY_TTL_S", "60s", "1 to 3600 (default 60)"),
        ("OBOL_SERVICE_JWT_SECRET", "hunter2", "at least 32 bytes"),
        ("OBOL_UPSTREAM_TIMEOUT_S", "-5", "whole seconds; 1 to 3600 (default 300)"),
        ("OBOL_DRAIN_TIMEOUT_S", "99999", "whole seconds; 1 to 3600 (default 30)"),
        ("OBOL_ALLOWED_ORIGINS", "*", "SCHEME://HOST[:PORT]"),
        ("OBOL_MAX_BODY_BYTES", "4 MB", "1 KiB to 256 MiB (default 4 MiB)"),
        ("OBOL_LOG", "inof", "levels `off`, `error`, `warn`, `info`, `debug` and `trace`"),
    ];
    let problems = Loaded::run(&Environment::new(bad.map(|(name, value, _)| (name, value)))).unwrap_err();
    assert_eq!(names(&problems), bad.map(|(name, _, _)| name));
    let text = problems.to_string();
    assert!(text.starts_with("`obol run` cannot start: 12 problems in the environment"), "{text}");
    for ((name, value, expected), problem) in bad.into_iter().zip(problems.iter()) {
        let problem = problem.to_string();
        assert!(problem.contains(expected), "{problem}");
        let variable = ALL.iter().find(|v| v.name == name).unwrap();
        let open = variable.secrecy == table::Secrecy::Open;
        assert_eq!(problem.contains(&format!("`{value}`")), open, "{problem}");
    }
    assert!(!text.contains("hunter2") && !text.contains("aHVudGVyMg"), "{text}");
}

#[test]
fn what_is_required_and_missing_or_empty_is_named_with_the_way_out() {
    let problems = Loaded::control(&Environment::new([("OBOL_REDIS_URL", "")])).unwrap_err();
    let required = ["OBOL_REDIS_URL", "OBOL_CREDENTIAL_KEY", "OBOL_WORKSPACES_DIR", "OBOL_STATE_DIR"];
    assert_eq!(names(&problems), required);
    let text = problems.to_string();
    assert!(text.contains("OBOL_WORKSPACES_DIR: not set, and there is no `--workspaces`"), "{text}");
    assert!(text.contains("OBOL_REDIS_URL: not set, and there is no default"), "{text}");
}

#[test]
fn an_option_wins_over_its_variable() {
    let env = env([("OBOL_STATE_DIR", "/from/env"), ("OBOL_WORKSPACES_DIR", "/workspaces")])
        .with_option(&table::STATE_DIR, Some("/from/option"))
        .with_option(&table::WORKSPACES_DIR, None::<&str>);
    let loaded = Loaded::control(&env).unwrap();
    assert!(matches!(&loaded.config.store, StoreAt::Directory(dir) if dir == Path::new("/from/option")));
    assert_eq!(loaded.config.workspaces, PathBuf::from("/workspaces"));
    assert!(loaded.effective.to_string().contains("OBOL_STATE_DIR=/from/option  # --state\n"));
}

#[test]
fn a_database_takes_the_place_of_the_directory() {
    let database = ("OBOL_DATABASE_URL", "postgres://me:hunter2@localhost/obol");
    for more in [vec![database], vec![database, ("OBOL_STATE_DIR", "/s")]] {
        let all = [vec![("OBOL_WORKSPACES_DIR", "/w")], more].concat();
        let loaded = Loaded::control(&env(all)).unwrap();
        assert!(matches!(loaded.config.store, StoreAt::Database(_)));
        let shown = format!("{}{:?}", loaded.effective, loaded.config);
        assert!(shown.contains("OBOL_DATABASE_URL=[secret]") && !shown.contains("hunter2"), "{shown}");
    }
}

#[test]
fn whoever_listens_for_replicas_can_tell_them_from_strangers() {
    let problems = Loaded::control(&env([
        ("OBOL_WORKSPACES_DIR", "/w"),
        ("OBOL_STATE_DIR", "/s"),
        ("OBOL_CONTROL_LISTEN", "127.0.0.1:9"),
    ]));
    let text = problems.unwrap_err().to_string();
    assert!(text.contains("OBOL_CONTROL_LISTEN: set without OBOL_SERVICE_JWT_SECRET"), "{text}");
}

#[test]
fn a_peer_channel_has_a_port_of_its_own_a_key_and_an_address_that_others_can_dial() {
    let key = ("OBOL_SERVICE_JWT_SECRET", "a secret that nobody can guess 123");
    assert!(Loaded::run(&env([])).unwrap().config.gateway.peer.is_none());
    let peer = |more: &[(&'static str, &'static str)]| {
        Loaded::run(&env([key].into_iter().chain(more.iter().copied())))
            .map(|loaded| loaded.config.gateway.peer)
    };
    let derived = peer(&[("OBOL_PEER_LISTEN", "10.0.0.5:8082")]).unwrap().unwrap();
    assert_eq!((derived.listen, derived.url), ("10.0.0.5:8082".parse().unwrap(), None));
    let given = peer(&[("OBOL_PEER_LISTEN", "0.0.0.0:8082"), ("OBOL_PEER_URL", "http://pod-1:8082")]);
    assert_eq!(given.unwrap().unwrap().url.unwrap().as_str(), "http://pod-1:8082/");

    for (more, expected) in [
        (
            &[("OBOL_PEER_LISTEN", "0.0.0.0:8082")][..],
            "OBOL_PEER_LISTEN: `0.0.0.0:8082` is no address that others can",
        ),
        (&[("OBOL_PEER_LISTEN", "[::]:8082")][..], "set OBOL_PEER_URL to where they reach this replica"),
        (&[("OBOL_PEER_LISTEN", "127.0.0.1:8080")][..], "is the address of OBOL_LISTEN"),
        (&[("OBOL_PEER_LISTEN", "127.0.0.1:8081")][..], "is the address of OBOL_ADMIN_LISTEN"),
        (&[("OBOL_PEER_URL", "http://pod-1:8082")][..], "OBOL_PEER_URL: set without OBOL_PEER_LISTEN"),
        (
            &[("OBOL_PEER_LISTEN", "10.0.0.5:1"), ("OBOL_PEER_URL", "http://u:p@pod-1")][..],
            "OBOL_PEER_URL: the value (not",
        ),
    ] {
        let problems = peer(more).unwrap_err();
        assert_eq!(problems.iter().count(), 1, "{problems}");
        assert!(problems.to_string().contains(expected), "{problems}");
    }
    let unsigned = Loaded::run(&env([("OBOL_PEER_LISTEN", "10.0.0.5:8082")])).unwrap_err().to_string();
    assert!(
        unsigned.contains("set without OBOL_SERVICE_JWT_SECRET or OBOL_SERVICE_JWT_KEY_FILE"),
        "{unsigned}"
    );
}

#[test]
fn text_that_is_not_utf8_is_a_problem_of_its_variable() {
    let env = Environment::new([(OsString::from("OBOL_LOG"), OsString::from_vec(vec![b'i', 0xff]))]);
    let problems = Loaded::dev(&env).unwrap_err();
    assert!(problems.to_string().contains("OBOL_LOG: `i\u{fffd}` is not UTF-8"), "{problems}");
}

#[test]
fn one_service_jwt_key_at_most() {
    let secret = "0123456789abcdef0123456789abcdef";
    let run = Loaded::run(&env([("OBOL_SERVICE_JWT_SECRET", secret)])).unwrap().config;
    assert!(matches!(run.gateway.service_jwt, Some(ServiceJwt::Secret(s)) if s.expose() == secret));
    let both = env([("OBOL_SERVICE_JWT_SECRET", secret), ("OBOL_SERVICE_JWT_KEY_FILE", "/nonexistent")]);
    let problems = Loaded::run(&both).unwrap_err().to_string();
    assert!(problems.contains("`/nonexistent` cannot be read"), "{problems}");
    assert!(problems.contains("set together with OBOL_SERVICE_JWT_SECRET: keep one of them"), "{problems}");
}

#[test]
fn no_call_outlives_its_idempotency_key() {
    let ttl = |ttl: &'static str| {
        Loaded::run(&env([
            ("OBOL_UPSTREAM_TIMEOUT_S", "100"),
            ("OBOL_DRAIN_TIMEOUT_S", "20"),
            ("OBOL_IDEMPOTENCY_TTL_S", ttl),
        ]))
    };
    assert_eq!(ttl("121").unwrap().config.gateway.idempotency_ttl, Duration::from_secs(121));
    let problems = ttl("120").unwrap_err().to_string();
    assert!(
        problems.contains("OBOL_IDEMPOTENCY_TTL_S: 120 s is not longer than OBOL_UPSTREAM_TIMEOUT_S and"),
        "{problems}"
    );
    assert_eq!(Loaded::run(&env([("OBOL_UPSTREAM_TIMEOUT_S", "-5")])).unwrap_err().iter().count(), 1);
}

#[test]
fn the_delay_of_a_drain_is_less_than_all_of_it() {
    let delay = |delay: &'static str| {
        Loaded::run(&env([("OBOL_DRAIN_TIMEOUT_S", "20"), ("OBOL_DRAIN_DELAY_S", delay)]))
    };
    assert_eq!(delay("0").unwrap().config.gateway.drain_delay, Duration::ZERO);
    assert_eq!(delay("19").unwrap().config.gateway.drain_delay, Duration::from_secs(19));
    let problems = delay("20").unwrap_err().to_string();
    assert!(
        problems.contains("OBOL_DRAIN_DELAY_S: 20 s is not less than OBOL_DRAIN_TIMEOUT_S, 20 s"),
        "{problems}"
    );
    assert_eq!(Loaded::run(&env([("OBOL_DRAIN_TIMEOUT_S", "-5")])).unwrap_err().iter().count(), 1);
}

#[test]
fn one_port_needs_one_address_that_is_known() {
    let one_port = |listen, admin| {
        let env = Environment::new([("OBOL_LISTEN", listen), ("OBOL_ADMIN_LISTEN", admin)]);
        Loaded::dev(&env).unwrap().config.gateway.one_port()
    };
    assert!(one_port("0.0.0.0:80", "0.0.0.0:80"));
    assert!(!one_port("0.0.0.0:80", "0.0.0.0:81"));
    assert!(!one_port("127.0.0.1:0", "127.0.0.1:0"));
}

#[test]
fn unknown_names_come_with_the_nearest_known_one_and_without_values() {
    let env = env([
        ("OBOL_SESION_TTL_S", "hunter2"),
        ("OBOL_LISTEN_ADMIN", "hunter2"),
        ("OBOL_REDIS", "hunter2"),
        ("PATH", "/bin"),
        ("obol_listen", "x"),
    ]);
    let unknown: Vec<_> = env.unknown().into_iter().map(|u| (u.name, u.nearest)).collect();
    assert_eq!(
        unknown,
        [
            ("OBOL_LISTEN_ADMIN".into(), "OBOL_LISTEN"),
            ("OBOL_REDIS".into(), "OBOL_REDIS_URL"),
            ("OBOL_SESION_TTL_S".into(), "OBOL_SESSION_TTL_S"),
        ]
    );
    assert!(!format!("{env:?}{:?}", env.unknown()).contains("hunter2"));
    assert!(Loaded::run(&env).is_ok(), "an unknown name is no reason to refuse the start");
}

#[test]
fn a_workspace_file_cannot_name_our_own_credentials() {
    let env = env([("GITHUB_TOKEN", "t")]);
    assert_eq!(env.secret("GITHUB_TOKEN").unwrap().expose(), "t");
    assert!(env.secret("OBOL_CREDENTIAL_KEY").is_none());
    assert!(env.secret("ABSENT").is_none());
}

#[test]
fn effective_values_are_shown_and_secrets_are_not() {
    let secret = "a-secret-that-nobody-may-see-1234";
    let env = env([("OBOL_KEY_TTL_S", "7"), ("OBOL_SERVICE_JWT_SECRET", secret)]);
    let loaded = Loaded::run(&env).unwrap();
    let shown = loaded.effective.to_string();
    for line in [
        "# obol run",
        "OBOL_LISTEN=127.0.0.1:8080  # default",
        "OBOL_KEY_TTL_S=7",
        "OBOL_REDIS_URL=redis://[secret]@localhost:6379/0",
        "OBOL_CREDENTIAL_KEY=[secret]",
        "OBOL_SERVICE_JWT_SECRET=[secret]",
        "# OBOL_SERVICE_JWT_KEY_FILE is not set: no key pair",
        "# OBOL_WORKER_THREADS is not set: one for each CPU that the process may use",
    ] {
        assert!(shown.lines().any(|l| l == line), "{line} in\n{shown}");
    }
    let debug = format!("{:?}", loaded.config);
    for text in [shown, debug] {
        for value in ["hunter2", secret, "AAECAwQF"] {
            assert!(!text.contains(value), "{text}");
        }
    }
}

#[test]
fn every_variable_of_a_command_is_read_and_shown() {
    let env = env([("OBOL_WORKSPACES_DIR", "/w"), ("OBOL_STATE_DIR", "/s")]);
    let shown = [
        (Subcommand::Run, Loaded::run(&env).unwrap().effective.to_string()),
        (Subcommand::Dev, Loaded::dev(&env).unwrap().effective.to_string()),
        (Subcommand::Control, Loaded::control(&env).unwrap().effective.to_string()),
        (Subcommand::Key, Loaded::operator(&env, Subcommand::Key).unwrap().effective.to_string()),
        (Subcommand::Publish, Loaded::operator(&env, Subcommand::Publish).unwrap().effective.to_string()),
        (Subcommand::Workspace, Loaded::operator(&env, Subcommand::Workspace).unwrap().effective.to_string()),
        (Subcommand::Usage, Loaded::usage(&env).unwrap().effective.to_string()),
        (Subcommand::UsageAudit, Loaded::usage_audit(&env).unwrap().effective.to_string()),
        (Subcommand::Check, Loaded::check(&env).unwrap().effective.to_string()),
    ];
    for (command, text) in shown {
        for v in ALL {
            let there = text.contains(&format!("{}=", v.name)) || text.contains(&format!("# {} ", v.name));
            assert_eq!(there, v.used_by.contains(&command), "{} of {command}", v.name);
        }
    }
}
