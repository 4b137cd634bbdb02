use std::net::IpAddr;

use obol_model::net;
use url::{Host, Url};

use super::reader::{Reader, short};
use super::yaml::{Node, place};

/// What the dialler may reach (DESIGN §16). Names are looked up when they are dialled, and checked again there: what
/// stands here covers what can be known from the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Public,
    /// Only if the operator says so.
    Private,
    /// Never: link-local and cloud metadata.
    Never,
}

impl Reader<'_> {
    /// A URL of an upstream.
    pub(super) fn url(&mut self, node: &Node, name: &str, allow_private: bool, query: bool) -> Option<Url> {
        let at = place(node);
        let text = self.string(node, &format!("`{name}`"))?;
        let url = match Url::parse(text) {
            Ok(url) => url,
            Err(e) => {
                // Not quoted: a URL may hold a credential.
                self.fault(
                    at,
                    format!("`{name}` is no URL: {e}"),
                    "write it like `https://host.example/path`",
                );
                return None;
            }
        };
        let Some(host) = url.host().filter(|_| matches!(url.scheme(), "http" | "https")) else {
            let help = "write it like `https://host.example/path`";
            self.fault(
                at,
                format!("`{name}` has the scheme `{}`, not http or https", short(url.scheme())),
                help,
            );
            return None;
        };
        let (wrong, help) = if !url.username().is_empty() || url.password().is_some() {
            (Some("credentials".to_owned()), "use `auth`")
        } else if url.fragment().is_some() {
            (Some("a fragment".to_owned()), "remove what follows `#`")
        } else if !query && url.query().is_some() {
            (Some("a query".to_owned()), "remove what follows `?`: paths are appended")
        } else {
            (None, "")
        };
        if let Some(wrong) = wrong {
            self.fault(at, format!("`{name}` must not contain {wrong}"), help);
            return None;
        }
        match reach(&host) {
            Reach::Never => {
                let message = format!("`{host}` is a link-local or metadata address, which is never dialled");
                self.fault(at, message, "name the server that is meant; no setting opens such an address");
                None
            }
            Reach::Private if !allow_private => {
                let help = "add `allow_private: true` if that is meant";
                self.fault(at, format!("`{host}` is a loopback or private address"), help);
                None
            }
            _ => {
                self.credential_in_url(node, name, &url);
                Some(url)
            }
        }
    }
}

fn reach(host: &Host<&str>) -> Reach {
    match host {
        Host::Domain(name) => {
            let name = name.trim_end_matches('.');
            if name == "localhost" || name.ends_with(".localhost") {
                Reach::Private
            } else if matches!(name, "metadata.google.internal" | "metadata.goog" | "instance-data") {
                Reach::Never
            } else {
                Reach::Public
            }
        }
        Host::Ipv4(ip) => reach_of(IpAddr::V4(*ip)),
        Host::Ipv6(ip) => reach_of(IpAddr::V6(*ip)),
    }
}

fn reach_of(ip: IpAddr) -> Reach {
    match (net::is_forbidden(ip, true), net::is_forbidden(ip, false)) {
        (true, _) => Reach::Never,
        (false, true) => Reach::Private,
        (false, false) => Reach::Public,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_apart_in_every_spelling() {
        let of = |text: &str| {
            let url = Url::parse(&format!("http://{text}/")).unwrap();
            reach(&url.host().unwrap())
        };
        for private in [
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "127.0.0.1",
            "127.1",
            "0x7f.1",
            "2130706433",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "[::1]",
            "[::]",
            "[fd12::1]",
            "[::ffff:127.0.0.1]",
            "[64:ff9b::10.0.0.1]",
        ] {
            assert_eq!(of(private), Reach::Private, "{private}");
        }
        for never in [
            "169.254.169.254",
            "[fe80::1]",
            "[::ffff:169.254.169.254]",
            "100.100.100.200",
            "[fd00:ec2::254]",
            "metadata.google.internal",
            "224.0.0.1",
            "2852039166",
            "0251.0376.0251.0376",
            "0xa9fea9fe",
            "0xa9.0xfe.0xa9.0xfe",
            "169.254.43518",
            "[::169.254.169.254]",
            "[64:ff9b::a9fe:a9fe]",
            "[2002:a9fe:a9fe::1]",
            "\u{ff11}69.254.169.254",
            "METADATA.GOOGLE.INTERNAL.",
        ] {
            assert_eq!(of(never), Reach::Never, "{never}");
        }
        for public in
            ["example.com", "8.8.8.8", "100.128.0.1", "172.32.0.1", "[2606:4700::1111]", "[::ffff:8.8.8.8]"]
        {
            assert_eq!(of(public), Reach::Public, "{public}");
        }
    }
}
