use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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
                self.fault(
                    at,
                    format!("`{host}` is a link-local or metadata address, which is never dialled"),
                    "",
                );
                None
            }
            Reach::Private if !allow_private => {
                let help = "add `allow_private: true` if that is meant";
                self.fault(at, format!("`{host}` is a loopback or private address"), help);
                None
            }
            _ => Some(url),
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
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, ..] = ip.octets();
            // The last one answers as metadata service in one large cloud.
            if ip.is_link_local() || ip.is_multicast() || ip == Ipv4Addr::new(100, 100, 100, 200) {
                Reach::Never
            } else if ip.is_private()
                || ip.is_loopback()
                || ip.is_broadcast()
                || a == 0
                || a == 100 && b & 0xc0 == 64
            {
                Reach::Private
            } else {
                Reach::Public
            }
        }
        IpAddr::V6(ip) => {
            let segments = ip.segments();
            let metadata = ip == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
            let carried = match segments {
                [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
                    let [.., a, b, c, d] = ip.octets();
                    Some(Ipv4Addr::new(a, b, c, d))
                }
                _ => None,
            };
            if let Some(v4) = carried {
                reach_of(IpAddr::V4(v4))
            } else if ip.is_unicast_link_local() || ip.is_multicast() || metadata {
                Reach::Never
            } else if ip.is_loopback() || ip.is_unspecified() || ip.is_unique_local() {
                Reach::Private
            } else {
                Reach::Public
            }
        }
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
