//! Which addresses the gateway may dial (DESIGN §16). One rule for every upstream, applied to the address that is
//! really dialled: a name that was harmless when it was registered can resolve to something else later.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Metadata services outside of the link-local ranges. They hand credentials of the machine to whoever asks, so no
/// permission opens them.
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200), // Alibaba Cloud
    Ipv4Addr::new(168, 63, 129, 16),   // Azure
    Ipv4Addr::new(192, 0, 0, 192),     // Oracle Cloud
];
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254), // AWS
    Ipv6Addr::new(0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254), // Google Cloud
];

/// Whether `ip` must not be dialled. Link-local, metadata, multicast and reserved addresses never may be; private and
/// loopback ones only where the operator allows them (`allow_private`). An IPv4 address inside an IPv6 one (mapped,
/// compatible, NAT64, 6to4) is judged as the IPv4 address that it leads to.
pub fn is_forbidden(ip: IpAddr, allow_private: bool) -> bool {
    match ip {
        IpAddr::V4(v4) => is_forbidden_v4(v4, allow_private),
        IpAddr::V6(v6) => match embedded_v4(v6) {
            Some(v4) => is_forbidden_v4(v4, allow_private),
            None => is_forbidden_v6(v6, allow_private),
        },
    }
}

fn is_forbidden_v4(ip: Ipv4Addr, allow_private: bool) -> bool {
    let [a, b, c, _] = ip.octets();
    let never = ip.is_link_local() || ip.is_multicast() || a >= 240 || METADATA_V4.contains(&ip);
    // `0.0.0.0/8` reaches this machine, 100.64/10 is carrier NAT, 198.18/15 is for benchmarks inside a network.
    let private = ip.is_private()
        || ip.is_loopback()
        || a == 0
        || (a == 100 && b & 0xc0 == 64)
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && b & 0xfe == 18);
    never || (private && !allow_private)
}

fn is_forbidden_v6(ip: Ipv6Addr, allow_private: bool) -> bool {
    let first = ip.segments()[0];
    let never = first & 0xffc0 == 0xfe80 || ip.is_multicast() || METADATA_V6.contains(&ip);
    // fc00::/7 is unique-local, fec0::/10 the site-local range that it replaced.
    let private =
        ip.is_loopback() || ip.is_unspecified() || first & 0xfe00 == 0xfc00 || first & 0xffc0 == 0xfec0;
    never || (private && !allow_private)
}

/// The IPv4 address that packets to `ip` end up at, when there is one.
fn embedded_v4(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    // :: and ::1 have rules of their own.
    if ip.is_unspecified() || ip.is_loopback() {
        return None;
    }
    let bits = ip.to_bits();
    let (first_96, first_16) = (bits >> 32, bits >> 112);
    match (first_96, first_16) {
        // IPv4-compatible (deprecated), mapped, translated, NAT64.
        (0 | 0xffff | 0xffff_0000 | 0x0064_ff9b_0000_0000_0000_0000, _) => Some(low_32(bits)),
        // 6to4.
        (_, 0x2002) => Some(low_32(bits >> 80)),
        _ => None,
    }
}

fn low_32(bits: u128) -> Ipv4Addr {
    let [.., a, b, c, d] = bits.to_be_bytes();
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forbidden(ip: &str, allow_private: bool) -> bool {
        is_forbidden(ip.parse().unwrap(), allow_private)
    }

    #[test]
    fn metadata_and_link_local_are_never_dialled() {
        for ip in [
            "169.254.169.254",
            "169.254.0.1",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "fe80::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "224.0.0.1",
            "255.255.255.255",
            "ff02::1",
        ] {
            assert!(forbidden(ip, true), "{ip}");
            assert!(forbidden(ip, false), "{ip}");
        }
    }

    #[test]
    fn private_and_loopback_are_dialled_only_when_allowed() {
        for ip in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "198.18.0.1",
            "::1",
            "::",
            "fd12:3456::1",
            "fc00::1",
            "fec0::1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
        ] {
            assert!(forbidden(ip, false), "{ip}");
            assert!(!forbidden(ip, true), "{ip}");
        }
    }

    #[test]
    fn public_addresses_are_dialled() {
        for ip in ["1.1.1.1", "172.32.0.1", "100.128.0.1", "198.20.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]
        {
            assert!(!forbidden(ip, false), "{ip}");
        }
    }
}
