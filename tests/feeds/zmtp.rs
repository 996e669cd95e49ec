//! Our ZeroMQ against another implementation of it.

use bytes::Bytes;
use pilotfish::zmtp::{Kind, Socket};
use tokio::net::TcpListener;
use zeromq::{
    DealerSocket, PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket,
    ZmqMessage,
};

use crate::kit::eventually::within;

fn message(parts: &[&'static [u8]]) -> ZmqMessage {
    ZmqMessage::try_from(parts.iter().map(|part| Bytes::from_static(part)).collect::<Vec<_>>()).unwrap()
}

async fn bound(socket: &mut impl zeromq::Socket) -> std::net::SocketAddr {
    let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    endpoint.strip_prefix("tcp://").unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn our_subscriber_hears_their_publisher() {
    let mut publisher = PubSocket::new();
    let mut socket = Socket::connect(bound(&mut publisher).await, Kind::Sub).await.unwrap();
    socket.send(&[b"\x01"]).await.unwrap();
    let publishing = async {
        loop {
            let mut long = message(&[b"topic", b"12345678"]);
            long.push_back(vec![7; 70_000].into());
            publisher.send(long).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    let heard = tokio::select! {
        heard = within("a message", socket.recv()) => heard.unwrap(),
        () = publishing => unreachable!(),
    };
    assert_eq!((&heard[0][..], &heard[1][..], heard[2].len()), (&b"topic"[..], &b"12345678"[..], 70_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn their_router_answers_our_question() {
    let mut router = RouterSocket::new();
    let mut socket = Socket::connect(bound(&mut router).await, Kind::Dealer).await.unwrap();
    socket.send(&[b"", b"\0\0\0\0\0\0\0\x02"]).await.unwrap();
    let asked = within("the question", router.recv()).await.unwrap().into_vec();
    assert_eq!((&asked[1][..], &asked[2][..]), (&b""[..], &b"\0\0\0\0\0\0\0\x02"[..]));
    let answer =
        vec![asked[0].clone(), Bytes::new(), Bytes::from_static(b"topic"), Bytes::from_static(b"payload")];
    router.send(ZmqMessage::try_from(answer).unwrap()).await.unwrap();
    let heard = within("the answer", socket.recv()).await.unwrap();
    assert_eq!(&heard[..], [&b""[..], b"topic", b"payload"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn their_sockets_take_what_ours_send() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let (mut sub, mut dealer) = (SubSocket::new(), DealerSocket::new());
    let accept = async |kind| Socket::accept(listener.accept().await.unwrap().0, kind).await.unwrap();
    let (connected, mut publisher) = tokio::join!(sub.connect(&address), accept(Kind::Pub));
    connected.unwrap();
    sub.subscribe("").await.unwrap();
    assert_eq!(&within("a subscription", publisher.recv()).await.unwrap()[..], [&b"\x01"[..]]);
    publisher.send(&[b"topic", b"payload"]).await.unwrap();
    assert_eq!(within("a message", sub.recv()).await.unwrap().into_vec(), [&b"topic"[..], b"payload"]);

    let (connected, mut router) = tokio::join!(dealer.connect(&address), accept(Kind::Router));
    connected.unwrap();
    dealer.send(message(&[b"", b"question"])).await.unwrap();
    assert_eq!(&within("a question", router.recv()).await.unwrap()[..], [&b""[..], b"question"]);
    router.send(&[b"", b"answer"]).await.unwrap();
    assert_eq!(within("an answer", dealer.recv()).await.unwrap().into_vec(), [&b""[..], b"answer"]);
}
