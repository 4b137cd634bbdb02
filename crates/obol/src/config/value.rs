//! From text to values that cannot be wrong. The errors are the second half of a sentence that begins with the value
//! (see [`Problem::bad`](super::problem::Problem)): they never repeat it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::Path;

use obol_auth::ServiceTokens;
use obol_model::Secret;
use tracing_subscriber::filter::{LevelFilter, Targets};
use url::Url;

/// The largest key file that is read. A key has about 120 bytes.
const LARGEST_KEY_FILE: u64 = 64 << 10;

/// Where Redis is. `Debug` and `Display` leave user name and password out; [`RedisUrl::expose`] has them.
#[derive(Clone)]
pub struct RedisUrl(Secret<Url>);

impl RedisUrl {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it, in words that show nothing of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|e| format!("is no URL: {e}"))?;
        if !matches!(url.scheme(), "redis" | "rediss") {
            return Err("has a scheme other than `redis` and `rediss`".into());
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err("names no host".into());
        }
        let database = url.path().trim_matches('/');
        if !database.is_empty() && database.parse::<u16>().is_err() {
            return Err("has a path that is no database number".into());
        }
        Ok(Self(Secret::new(url)))
    }

    /// The whole URL, with its password. For the client only.
    pub fn expose(&self) -> &str {
        self.0.expose().as_str()
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.0.expose();
        write!(f, "{}://", url.scheme())?;
        if !url.username().is_empty() || url.password().is_some() {
            f.write_str("[secret]@")?;
        }
        f.write_str(url.host_str().unwrap_or_default())?;
        if let Some(port) = url.port() {
            write!(f, ":{port}")?;
        }
        // A query can carry a password too (`?password=…` is common usage): it is left out.
        if url.path() == "/" { Ok(()) } else { f.write_str(url.path()) }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What signs the service JWTs that this process accepts (DESIGN §8.2).
#[derive(Debug, Clone)]
pub enum ServiceJwt {
    /// HS256 with a shared secret.
    Secret(Secret<String>),
    /// `EdDSA`; an Ed25519 private key as PKCS #8 PEM.
    Ed25519(Secret<String>),
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
fn items(text: &str) -> impl Iterator<Item = &str> {
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

pub(super) fn shared_secret(text: &str, min: usize) -> Result<ServiceJwt, String> {
    if text.len() < min {
        return Err(format!("has {} bytes", text.len()));
    }
    Ok(ServiceJwt::Secret(Secret::new(text.to_owned())))
}

pub(super) fn ed25519_file(path: &str) -> Result<ServiceJwt, String> {
    let cannot = |e: io::Error| format!("cannot be read: {e}");
    let bytes = obol_control::read_bounded(Path::new(path), LARGEST_KEY_FILE).map_err(cannot)?;
    let pem = String::from_utf8(bytes).map(Secret::new).map_err(|_| "is not text")?;
    ServiceTokens::from_ed25519_pem("", &pem).map_err(|_| "holds no Ed25519 private key in PKCS #8")?;
    Ok(ServiceJwt::Ed25519(pem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redis_url_never_shows_who_it_logs_in_as() {
        for (text, shown) in [
            ("redis://localhost", "redis://localhost"),
            ("redis://localhost:6380/2", "redis://localhost:6380/2"),
            ("rediss://me:hunter2@redis.example:6379/0", "rediss://[secret]@redis.example:6379/0"),
            ("redis://:hunter2@[::1]:1", "redis://[secret]@[::1]:1"),
            ("redis://hunter2@h/", "redis://[secret]@h"),
            ("redis://h/0?password=hunter2", "redis://h/0"),
        ] {
            let url = RedisUrl::parse(text).unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
            assert_eq!(url.expose(), text);
        }
    }

    #[test]
    fn redis_urls_that_no_client_would_take_are_refused() {
        for bad in
            ["", "localhost:6379", "http://h", "redis://", "redis:///0", "redis://h/db", "redis+sentinel://h"]
        {
            let why = RedisUrl::parse(bad).unwrap_err();
            assert!(bad.is_empty() || !why.contains(bad), "{why}");
        }
    }

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
        assert!(matches!(ed25519_file(&good), Ok(ServiceJwt::Ed25519(_))));
        let public = file("public.pem", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n");
        let garbage = file("garbage.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        for bad in [public, garbage] {
            assert!(ed25519_file(&bad).unwrap_err().contains("no Ed25519"), "{bad}");
        }
        assert!(ed25519_file("/nonexistent/key.pem").unwrap_err().contains("cannot be read"));
        assert_eq!(ed25519_file("/dev/zero").unwrap_err(), "cannot be read: it is no regular file");
        let endless = file("endless.pem", &"A".repeat(70_000));
        assert_eq!(ed25519_file(&endless).unwrap_err(), "cannot be read: it is larger than 65536 bytes");
    }
}
