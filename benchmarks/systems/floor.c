/* Receives ranges of objects over HTTP/1.1, with TLS or without, and does nothing else.

   What a client cannot do without: a request, one SSL_read per record, and the caller's memory as
   its destination. `benchmarks/systems/floor.py` builds it and calls it without Python's lock. */

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct {
    int fd;
    SSL *ssl; /* NULL: plain */
} Connection;

SSL_CTX *floor_trust(const char *authority) {
    SSL_CTX *trust = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_verify(trust, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_read_ahead(trust, 1);
    if (SSL_CTX_load_verify_locations(trust, authority, NULL) != 1) return NULL;
    return trust;
}

Connection *floor_open(const char *host, const char *port, SSL_CTX *trust) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, port, &hints, &found)) return NULL;
    Connection *one = calloc(1, sizeof *one);
    one->fd = socket(found->ai_family, SOCK_STREAM, 0);
    int on = 1, failed = connect(one->fd, found->ai_addr, found->ai_addrlen);
    setsockopt(one->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    freeaddrinfo(found);
    if (!failed && trust) {
        one->ssl = SSL_new(trust);
        SSL_set_fd(one->ssl, one->fd);
        failed = SSL_connect(one->ssl) != 1;
    }
    if (!failed) return one;
    close(one->fd);
    free(one);
    return NULL;
}

void floor_close(Connection *one) {
    if (one->ssl) SSL_free(one->ssl);
    close(one->fd);
    free(one);
}

static long take(Connection *one, char *into, long most) {
    return one->ssl ? SSL_read(one->ssl, into, (int)most) : recv(one->fd, into, most, 0);
}

/* Returns 0, or -1 if something else than a range of that length came. */
int floor_fetch(Connection *one, const char *request, char *into, long length) {
    char head[16384];
    long size = strlen(request), at = 0, have = 0;
    if ((one->ssl ? SSL_write(one->ssl, request, (int)size) : send(one->fd, request, size, 0)) != size)
        return -1;
    char *body = NULL;
    while (!body) {
        long count = take(one, head + have, sizeof head - 1 - have);
        if (count <= 0) return -1;
        have += count;
        head[have] = 0;
        body = strstr(head, "\r\n\r\n");
        if (!body && have == sizeof head - 1) return -1;
    }
    *body = 0;
    body += 4;
    char *told = strcasestr(head, "\r\ncontent-length:");
    if (strncmp(head + 8, " 206 ", 5) || !told || atol(told + 17) != length) return -1;
    at = head + have - body;
    if (at > length) return -1;
    memcpy(into, body, at);
    while (at < length) {
        long count = take(one, into + at, length - at);
        if (count <= 0) return -1;
        at += count;
    }
    return 0;
}
