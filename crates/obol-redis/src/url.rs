use std::fmt;
use std::net::Ipv6Addr;

use obol_model::Secret;
use percent_encoding::percent_decode_str;

use crate::server::{Address, Credentials};

/// The forms of a URL, for people.
pub(crate) const FORMS: &str = "`redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, \
    `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST…/MASTER[/DB]` or \
    `redis+cluster://[USER:PASSWORD@]HOST[:PORT],HOST…`, each with `rediss` for TLS";

const REDIS_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Where Redis is: one server, a master that Sentinel watches, or a Cluster. `Debug` and `Display` leave out whatever
/// may be secret; [`RedisUrl::expose`] has all of it.
#[derive(Clone)]
pub struct RedisUrl {
    text: Secret<String>,
    /// What may be shown.
    shown: String,
    pub(crate) tls: bool,
    pub(crate) credentials: Credentials,
    pub(crate) hosts: Vec<Address>,
    pub(crate) layout: Layout,
}

/// How many servers there are, and who knows which one counts.
#[derive(Clone)]
pub(crate) enum Layout {
    /// The one host is the server.
    Single { db: u16 },
    /// The hosts are sentinels, which have a login of their own.
    Sentinel { master: String, db: u16, login: Credentials },
    /// The hosts are some of the nodes.
    Cluster,
}

impl RedisUrl {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it: the second half of a sentence that begins with the URL, and shows nothing of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("has no scheme")?;
        let scheme = scheme.to_ascii_lowercase();
        let tls = scheme.starts_with("rediss");
        if let Some((before, _)) = rest.rsplit_once('@')
            && before.contains(['/', '?', '#'])
        {
            return Err(
                "has a special character before its `@`; write `%` escapes in user and password".into()
            );
        }
        let (rest, fragment) = rest.split_once('#').map_or((rest, None), |(rest, after)| (rest, Some(after)));
        if fragment.is_some() {
            return Err("has a fragment (`#…`), which means nothing here".into());
        }
        let (rest, query) = rest.split_once('?').map_or((rest, ""), |(rest, query)| (rest, query));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, names) =
            authority.rsplit_once('@').map_or((None, authority), |(login, names)| (Some(login), names));
        let default_port = if scheme.ends_with("+sentinel") { SENTINEL_PORT } else { REDIS_PORT };
        let hosts =
            names.split(',').map(|name| host(name, default_port)).collect::<Result<Vec<_>, String>>()?;
        let path: Vec<String> =
            path.trim_end_matches('/').split('/').map(decoded).collect::<Result<_, _>>()?;
        let path: Vec<&str> = path.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();

        let mut query = query.split('&').filter(|pair| !pair.is_empty());
        let layout =
            match (scheme.trim_start_matches("rediss").trim_start_matches("redis"), &*path) {
                ("", []) => Layout::Single { db: 0 },
                ("", [db]) => Layout::Single { db: database(db)? },
                ("", _) => return Err("has a path that is no database number".into()),
                ("+sentinel", []) => return Err("names no master; its path is `/MASTER[/DB]`".into()),
                ("+sentinel", [master, db @ ..]) => {
                    let db = match db {
                        [] => 0,
                        [db] => database(db)?,
                        _ => return Err("has a path other than `/MASTER[/DB]`".into()),
                    };
                    let login = sentinel_login(&mut query)?;
                    Layout::Sentinel { master: (*master).to_owned(), db, login }
                }
                ("+cluster", [] | ["0"]) => Layout::Cluster,
                ("+cluster", _) => return Err("has a path, but a Cluster has only the database 0".into()),
                _ => return Err(
                    "has a scheme other than `redis` and `rediss`, alone or with `+sentinel` or `+cluster`"
                        .into(),
                ),
            };
        if matches!(layout, Layout::Single { .. }) && hosts.len() > 1 {
            return Err("names several hosts; that is for `redis+sentinel` and `redis+cluster`".into());
        }
        if query.next().is_some() {
            return Err("has a query parameter that means nothing here".into());
        }
        let credentials = login.map(Credentials::parse).transpose()?.unwrap_or_default();
        let shown = shown(&scheme, login.is_some(), names, &path);
        Ok(Self { text: Secret::new(text.to_owned()), shown, tls, credentials, hosts, layout })
    }

    /// The whole URL, with its password. For the client only.
    pub fn expose(&self) -> &str {
        self.text.expose()
    }
}

fn shown(scheme: &str, login: bool, names: &str, path: &[&str]) -> String {
    let mut shown = format!("{scheme}://{}{names}", if login { "[secret]@" } else { "" });
    for part in path {
        shown.push('/');
        shown.push_str(part);
    }
    shown
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

fn decoded(text: &str) -> Result<String, String> {
    // An escape that is none is decoded as it stands, so that a password with a `%` would be another one than was meant.
    let whole = |after: &str| {
        let mut digits = after.bytes();
        let mut digit = || digits.next().is_some_and(|digit| digit.is_ascii_hexdigit());
        digit() && digit()
    };
    if !text.split('%').skip(1).all(whole) {
        return Err("has a `%` that begins no escape; write `%25` for a `%`".to_owned());
    }
    let text = percent_decode_str(text).decode_utf8();
    text.map(std::borrow::Cow::into_owned).map_err(|_| "has `%` escapes that are not UTF-8".to_owned())
}

fn database(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "has a path that is no database number".to_owned())
}

fn host(text: &str, default_port: u16) -> Result<Address, String> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or("has a host that lacks its `]`")?;
        host.parse::<Ipv6Addr>().map_err(|_| "has a host in brackets that is no IPv6 address")?;
        (host, port)
    } else {
        let at = text.find(':').unwrap_or(text.len());
        text.split_at(at)
    };
    if host.is_empty() {
        return Err("names no host".into());
    }
    if !host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:".contains(&b)) {
        return Err("has a host that is no name".into());
    }
    let port = match port.strip_prefix(':') {
        Some(digits) => digits.parse().map_err(|_| "has a port that is no number up to 65535")?,
        None if port.is_empty() => default_port,
        None => return Err("has a host that is no name".into()),
    };
    Ok(Address::new(host, port))
}

impl Credentials {
    /// `USER:PASSWORD`, `:PASSWORD`.
    fn parse(text: &str) -> Result<Self, String> {
        let (user, password) =
            text.split_once(':').ok_or("names a user without a password; write `USER:PASSWORD@`")?;
        let user = Some(decoded(user)?).filter(|user| !user.is_empty());
        Ok(Self { user, password: Some(Secret::new(decoded(password)?)) })
    }
}

fn sentinel_login<'a>(query: &mut impl Iterator<Item = &'a str>) -> Result<Credentials, String> {
    let mut login = Credentials::default();
    for pair in query {
        match pair.split_once('=') {
            Some(("sentinel_username", user)) => login.user = Some(decoded(user)?),
            Some(("sentinel_password", password)) => {
                login.password = Some(Secret::new(decoded(password)?));
            }
            _ => {
                return Err(
                    "has a query parameter other than `sentinel_username` and `sentinel_password`".into()
                );
            }
        }
    }
    if login.user.is_some() && login.password.is_none() {
        return Err("has a `sentinel_username` without a `sentinel_password`".into());
    }
    Ok(login)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_taken_and_shown_without_its_secrets() {
        for (text, shown) in [
            ("redis://localhost", "redis://localhost"),
            ("redis://localhost:6380/2", "redis://localhost:6380/2"),
            ("rediss://me:hunter2@redis.example:6379/0", "rediss://[secret]@redis.example:6379/0"),
            ("redis://:hunter2@[::1]:1", "redis://[secret]@[::1]:1"),
            ("REDIS://h/", "redis://h"),
            (
                "redis+sentinel://me:hunter2@a,b:26380/main/3?sentinel_username=hunter2&sentinel_password=hunter2",
                "redis+sentinel://[secret]@a,b:26380/main/3",
            ),
            ("rediss+cluster://:hunter2@a:7000,[::1]:7001", "rediss+cluster://[secret]@a:7000,[::1]:7001"),
            ("redis+cluster://a/0", "redis+cluster://a/0"),
        ] {
            let url = RedisUrl::parse(text).unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
            assert_eq!(url.expose(), text);
        }
    }

    #[test]
    fn its_parts_are_found() {
        let url =
            RedisUrl::parse("rediss+sentinel://me:p%40ss%2f@a,[::1]:5/my%20master/3?sentinel_password=x")
                .unwrap();
        assert!(url.tls);
        assert_eq!(url.credentials.user.as_deref(), Some("me"));
        assert_eq!(url.credentials.password.unwrap().expose(), "p@ss/");
        assert_eq!(url.hosts, [Address::new("a", 26379), Address::new("::1", 5)]);
        let Layout::Sentinel { master, db, login } = url.layout else { panic!("{}", url.shown) };
        assert_eq!((&*master, db, login.user), ("my master", 3, None));
        assert_eq!(login.password.unwrap().expose(), "x");

        let url = RedisUrl::parse("redis://:a:b@h").unwrap();
        assert!(!url.tls && url.credentials.user.is_none());
        assert_eq!(url.credentials.password.unwrap().expose(), "a:b");
        assert_eq!(url.hosts, [Address::new("h", 6379)]);
    }

    #[test]
    fn what_cannot_be_used_is_refused_without_repeating_it() {
        for (text, expected) in [
            ("", "no scheme"),
            ("hunter2:6379", "no scheme"),
            ("http://hunter2", "a scheme other than"),
            ("redis+unix://hunter2", "a scheme other than"),
            ("redis://", "no host"),
            ("redis:///0", "no host"),
            ("redis://:hunter2@", "no host"),
            ("redis://:hunter2/x@h", "`%` escapes"),
            ("redis://:hunter2#x@h", "`%` escapes"),
            ("redis://:hunter2%zz@h", "write `%25`"),
            ("redis://hunter2%:x@h", "write `%25`"),
            ("redis://:x%4@h", "write `%25`"),
            ("redis+sentinel://a/m?sentinel_password=hunter2%", "write `%25`"),
            ("redis://:%ff@h", "not UTF-8"),
            ("redis://:hunter2@h:port", "no number"),
            ("redis://:hunter2@h:70000", "no number"),
            ("redis://:hunter2@h/hunter2", "no database number"),
            ("redis://:hunter2@h/1/2", "no database number"),
            ("redis://hunter2@h", "without a password"),
            ("redis://:hunter2@[::g]:1", "no IPv6"),
            ("redis://:hunter2@h o", "no name"),
            ("redis://h,hunter2", "several hosts"),
            ("redis://h?hunter2", "query"),
            ("rediss://h#hunter2", "fragment"),
            ("redis+sentinel://:hunter2@a,b", "no master"),
            ("redis+sentinel://a/hunter2/x", "no database number"),
            ("redis+sentinel://a/m?password=hunter2", "query"),
            ("redis+sentinel://a/m?sentinel_username=hunter2", "without a `sentinel_password`"),
            ("redis+cluster://a,b/hunter2", "database 0"),
            ("redis+cluster://a,,b", "no host"),
        ] {
            let why = RedisUrl::parse(text).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
            assert!(!why.contains("hunter2"), "{why}");
        }
    }
}
