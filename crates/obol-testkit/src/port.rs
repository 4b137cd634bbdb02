//! A loopback port that stays ours while nobody listens on it.
//!
//! Servers that are cut, killed and started again must come back on the same address, and in between a connection to
//! them must be refused. Closing the listener alone would give the port back to the kernel, which may hand it to the
//! next socket on the machine. So the kit keeps a second socket bound to it that never listens: with `SO_REUSEADDR` on
//! both sides Linux lets a listener share the port with it, `connect` is refused while only the placeholder is there,
//! and the kernel gives the port to no one else, not even as the source port of an outgoing connection.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

/// A reserved loopback port. While it lives, connections to it are refused unless something listens there.
#[derive(Debug)]
pub struct Port {
    addr: SocketAddr,
    _placeholder: TcpSocket,
}

impl Port {
    /// Reserves a port that the kernel chooses.
    pub fn reserve() -> Self {
        let placeholder = TcpSocket::new_v4().expect("a TCP socket");
        placeholder.set_reuseaddr(true).expect("SO_REUSEADDR");
        placeholder.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free loopback port");
        let addr = placeholder.local_addr().expect("the bound address");
        Self { addr, _placeholder: placeholder }
    }

    /// The reserved address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Listens on the port. Dropping the listener makes connections refused again.
    pub fn listen(&self) -> TcpListener {
        let socket = TcpSocket::new_v4().expect("a TCP socket");
        socket.set_reuseaddr(true).expect("SO_REUSEADDR");
        socket.bind(self.addr).expect("the reserved port");
        socket.listen(1024).expect("a listener on the reserved port")
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn a_reserved_port_refuses_until_it_listens_and_after_it_stops() {
        let port = Port::reserve();
        for _ in 0..3 {
            assert_eq!(
                TcpStream::connect(port.addr()).await.unwrap_err().kind(),
                ErrorKind::ConnectionRefused
            );
            let listener = port.listen();
            let (client, accepted) = tokio::join!(TcpStream::connect(port.addr()), listener.accept());
            client.unwrap();
            accepted.unwrap();
        }
    }
}
