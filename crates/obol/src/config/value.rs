//! From text to values that cannot be wrong. The errors are the second half of a sentence that begins with the value
//! (see [`Problem::bad`](super::problem::Problem)): they never repeat it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use obol_auth::{ServiceTokens, TrustedKeys};
use obol_model::Secret;
use tracing_subscriber::filter::{LevelFilter, Targets};
use url::Url;

/// The largest key file that is read. A key has about 120 bytes.
const LARGEST_KEY_FILE: u64 = 64 << 10;

/// The largest file of certificates that is read: all public authorities take about 250 KiB.
const LARGEST_CERTIFICATES_FILE: u64 = 1 << 20;

/// What signs and verifies service JWTs (DESIGN §8.2).
#[derive(Debug, Clone)]
pub enum ServiceJwt {
    /// HS256 with a shared secret.
    Secret(Secret<String>),
    /// `EdDSA`.
    Ed25519 {
        /// Ed25519 private keys as PKCS #8 PEM.
        private: Secret<String>,
        /// The public keys of the other side; `None` when it has the same private key.
        trusted: Option<TrustedKeys>,
    },
}

/// Where an HTTP service of ours is, with a path that ends in `/`.
pub(super) fn base_url(text: &str) -> Result<Url, String> {
    let mut url = Url::parse(text).map_err(|e| format!("is no URL: {e}"))?;
    obol_dial::check(&url, true).map_err(|e| format!("cannot be used: {e}"))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err("has a query or a fragment".into());
    }
    if !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok(url)
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// For people.
    Pretty,
}

pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "is no IP address with a port".to_owned())
}

/// Where Postgres is, as its client reads it.
pub(super) fn database_url(text: &str) -> Result<Secret<String>, String> {
    let url = Secret::new(text.to_owned());
    obol_control::PostgresStore::new(&url).map(|_| url)
}

/// A whole number within the range, both ends included.
pub(super) fn number(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let n: u64 = text.parse().map_err(|_| "is no whole number".to_owned())?;
    within(n, min, max)
}

pub(super) fn bytes(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix("MiB") {
        Some(rest) => (rest, 1024 * 1024),
        None => text.strip_suffix("KiB").map_or((text, 1), |rest| (rest, 1024)),
    };
    let n: u64 = digits.trim_end().parse().map_err(|_| "is no number of bytes".to_owned())?;
    within(n.saturating_mul(unit), min, max)
}

fn within(n: u64, min: u64, max: u64) -> Result<u64, String> {
    if n < min {
        Err("is too small".into())
    } else if n > max {
        Err("is too large".into())
    } else {
        Ok(n)
    }
}

/// The items of a list that is separated by commas.
pub(super) fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
}

/// Origins in the form in which browsers send them: lower case, no path. Schemes other than `http` and `https` are
/// allowed, since editors and desktop applications have their own.
pub(super) fn origins(text: &str) -> Result<Vec<String>, String> {
    items(text)
        .enumerate()
        .map(|(i, origin)| {
            let bad = |what: &str| format!("has an entry that {what} (number {})", i + 1);
            let (scheme, host) = origin.split_once("://").ok_or_else(|| bad("is no origin"))?;
            let scheme_ok = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
            if !scheme_ok || host.is_empty() {
                return Err(bad("is no origin"));
            }
            if host.contains(['/', '?', '#']) {
                return Err(bad("has a path"));
            }
            if host.contains(['*', '@', ' ']) {
                return Err(bad("has a character that no origin has"));
            }
            if matches!(scheme.to_ascii_lowercase().as_str(), "http" | "https") {
                // Canonical as browsers write it: default ports left out, names in ASCII.
                let url = Url::parse(origin).map_err(|_| bad("is no origin"))?;
                return Ok(url.origin().ascii_serialization());
            }
            Ok(origin.to_ascii_lowercase())
        })
        .collect()
}

/// Host names in lower case, IPv6 addresses in brackets.
pub(super) fn hosts(text: &str) -> Result<Vec<String>, String> {
    items(text)
        .enumerate()
        .map(|(i, host)| match url::Host::parse(host) {
            Ok(host) => Ok(host.to_string()),
            Err(_) => Err(format!("has an entry that is no host name (number {})", i + 1)),
        })
        .collect()
}

/// A filter of log lines. Stricter than the parser of `tracing_subscriber`, which takes a mistyped level for a target
/// of that name and then shows nothing else.
pub(super) fn log_filter(text: &str) -> Result<Targets, String> {
    let mut filter = Targets::new();
    for item in items(text) {
        let (target, level) = match item.split_once('=') {
            Some((target, level)) => (Some(target.trim()), level.trim()),
            None => (None, item),
        };
        let level = match level {
            "off" => LevelFilter::OFF,
            "error" => LevelFilter::ERROR,
            "warn" => LevelFilter::WARN,
            "info" => LevelFilter::INFO,
            "debug" => LevelFilter::DEBUG,
            "trace" => LevelFilter::TRACE,
            _ => return Err("names something that is no level".into()),
        };
        filter = match target {
            None => filter.with_default(level),
            Some(t)
                if !t.is_empty()
                    && t.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':') =>
            {
                filter.with_target(t, level)
            }
            Some(_) => return Err("names something that is no target".into()),
        };
    }
    Ok(filter)
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "json" => Ok(LogFormat::Json),
        "pretty" => Ok(LogFormat::Pretty),
        _ => Err("is neither".into()),
    }
}

pub(super) fn shared_secret(text: &str, min: usize) -> Result<Secret<String>, String> {
    if text.len() < min {
        return Err(format!("has {} bytes", text.len()));
    }
    Ok(Secret::new(text.to_owned()))
}

/// PEM certificates of authorities.
pub(super) fn certificates_file(path: &str) -> Result<Vec<u8>, String> {
    let cannot = |e: io::Error| format!("cannot be read: {e}");
    let bytes = obol_control::read_bounded(Path::new(path), LARGEST_CERTIFICATES_FILE).map_err(cannot)?;
    let begin = b"-----BEGIN CERTIFICATE-----";
    if !bytes.windows(begin.len()).any(|window| window == begin) {
        return Err("holds no PEM certificate".into());
    }
    Ok(bytes)
}

pub(super) fn ed25519_file(path: &str) -> Result<Secret<String>, String> {
    let pem = key_file(path).map(Secret::new)?;
    ServiceTokens::from_ed25519_pem("", &pem)
        .map_err(|_| "holds something else than Ed25519 private keys in PKCS #8")?;
    Ok(pem)
}

pub(super) fn ed25519_public_file(path: &str) -> Result<TrustedKeys, String> {
    let pem = key_file(path)?;
    if pem.contains("PRIVATE KEY-----") {
        return Err("holds a private key, which is nobody else's business".into());
    }
    TrustedKeys::from_pem(&pem).map_err(|_| "holds something else than Ed25519 public keys".into())
}

fn key_file(path: &str) -> Result<String, String> {
    let cannot = |e: io::Error| format!("cannot be read: {e}");
    let bytes = obol_control::read_bounded(Path::new(path), LARGEST_KEY_FILE).map_err(cannot)?;
    String::from_utf8(bytes).map_err(|_| "is not text".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_to_their_range() {
        assert_eq!(number("5", 5, 7), Ok(5));
        assert_eq!(number("7", 5, 7), Ok(7));
        for bad in ["4", "8", "-1", "5.0", " 6", "", "6s", "18446744073709551616"] {
            assert!(number(bad, 5, 7).is_err(), "{bad}");
        }
        assert_eq!(bytes("2048", 1, 1 << 30), Ok(2048));
        assert_eq!(bytes("4 MiB", 1, 1 << 30), Ok(4 << 20));
        assert_eq!(bytes("8KiB", 1, 1 << 30), Ok(8192));
        for bad in ["4 MB", "4M", "MiB", "-1", "1e6", "18446744073709551615 MiB"] {
            assert!(bytes(bad, 1, 1 << 30).is_err(), "{bad}");
        }
    }

    #[test]
    fn origins_take_the_form_that_browsers_send() {
        assert_eq!(
            origins("https://App.Example:443, http://localhost:5173,vscode-file://vscode-app").unwrap(),
            ["https://app.example", "http://localhost:5173", "vscode-file://vscode-app"]
        );
        for bad in
            ["*", "null", "example.com", "https://", "https://a/", "https://*.a", "https://a,", "https://u@a"]
        {
            assert!(origins(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn hosts_are_names_without_ports() {
        assert_eq!(hosts("API.example, 10.0.0.1,[::1]").unwrap(), ["api.example", "10.0.0.1", "[::1]"]);
        for bad in ["a:80", "a b", "", "https://a", "a,"] {
            assert!(hosts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mistyped_level_is_no_target() {
        let filter = log_filter("warn,obol_mcp=trace").unwrap();
        assert!(filter.would_enable("obol_mcp::pool", &tracing::Level::TRACE));
        assert!(!filter.would_enable("obol", &tracing::Level::INFO));
        for bad in ["inof", "obol=loud", "=info", "[span]=info", "obol=", "", "info,", "INFO"] {
            assert!(log_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_file_holds_an_ed25519_private_key() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        // `openssl genpkey -algorithm ed25519`
        let good = file(
            "good.pem",
            "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIHZMZvhgXoz81+OeKjCC7TMLWQCUIwx6mIy7EYyjLb6w\n\
             -----END PRIVATE KEY-----\n",
        );
        assert!(ed25519_file(&good).is_ok());
        let public = file("public.pem", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n");
        let garbage = file("garbage.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        for bad in [public, garbage] {
            assert!(ed25519_file(&bad).unwrap_err().contains("something else than Ed25519"), "{bad}");
        }
        // `openssl pkey -pubout`
        let public = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                      -----END PUBLIC KEY-----\n";
        assert!(ed25519_public_file(&file("others.pem", &public.repeat(2))).is_ok());
        let secret = std::fs::read_to_string(&good).unwrap();
        for (bad, what) in [
            (String::new(), "something else"),
            (public.replace("MCow", "MCox"), "something else"),
            (format!("{public}{secret}"), "a private key"),
        ] {
            let why = ed25519_public_file(&file("bad.pem", &bad)).unwrap_err();
            assert!(why.contains(what), "{bad}: {why}");
        }
        assert!(ed25519_file("/nonexistent/key.pem").unwrap_err().contains("cannot be read"));
        assert_eq!(ed25519_file("/dev/zero").unwrap_err(), "cannot be read: it is no regular file");
        let endless = file("endless.pem", &"A".repeat(70_000));
        assert_eq!(ed25519_file(&endless).unwrap_err(), "cannot be read: it is larger than 65536 bytes");
    }
}
