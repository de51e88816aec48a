/* A wide-area network between network namespaces: one TUN device in each, joined here in user space.
 *
 * usage: wan NETNS:UP:DOWN:DELAY_MS:QUEUE_MS ...   (host k has address *.*.*.(k+1); rates in Mbit/s of IP packets)
 * stdin: "rate HOST UP DOWN" and "cut HOST 0|1" change a running network; end of file ends it. Prints "up" when ready.
 *
 * A packet leaves its sender's uplink in turn (dropped when it would wait longer than QUEUE_MS), flies for the two
 * hosts' delays, and then waits its turn on the receiver's downlink. Per host both waiting lines are rings: those in
 * flight from one host to hosts of equal delay arrive in the order sent, so only the heads need comparing.
 * Segmentation stays off-loaded: a large segment crosses whole and is charged one header for each packet it stands for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 40, RING = 1 << 14, FRAME = 66000 };
static const int64_t GRAIN_NS = 250000; /* looks no more often: what gathers meanwhile is moved in one go */

struct packet { int64_t due; int to, size, wire; uint8_t bytes[]; };
struct ring { struct packet *slot[RING]; unsigned head, tail; };
struct link { double ns_per_byte; int64_t free_at; };
struct host { int tun, cut; struct link up, down; int64_t delay, patience; struct ring flying, landing; };

static struct host *hosts[HOSTS];
static int count;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) { perror(what); exit(1); }

static int open_tun(const char *space) {
  char path[256];
  snprintf(path, sizeof path, "/run/netns/%s", space);
  int ns = open(path, O_RDONLY | O_CLOEXEC);
  if (ns < 0 || setns(ns, CLONE_NEWNET)) fail(path);
  close(ns);
  int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_name = "wan0"};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(fd, TUNSETIFF, &request)) fail("TUNSETIFF");
  if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
  return fd;
}

static void set_rates(struct host *h, double up, double down) {
  h->up.ns_per_byte = 8000 / up;
  h->down.ns_per_byte = 8000 / down;
}

/* When the last bit is through, -1 if the queue is full. */
static int64_t cross(struct link *l, int64_t at, int wire, int64_t patience) {
  int64_t start = l->free_at > at ? l->free_at : at;
  if (start - at > patience) return -1;
  return l->free_at = start + (int64_t)(wire * l->ns_per_byte);
}

static void put(struct ring *r, struct packet *p, int64_t due) {
  if (due < 0 || r->tail - r->head == RING) { free(p); return; }
  p->due = due;
  r->slot[r->tail++ % RING] = p;
}

static int wire_bytes(const uint8_t *frame, int size) {
  const struct virtio_net_hdr *v = (const void *)frame;
  const uint8_t *ip = frame + sizeof *v;
  int bytes = size - (int)sizeof *v;
  if (v->gso_type == VIRTIO_NET_HDR_GSO_NONE || !v->gso_size) return bytes;
  int ip_header = (ip[0] & 15) * 4, headers = ip_header + (ip[ip_header + 12] >> 4) * 4;
  return bytes + ((bytes - headers - 1) / v->gso_size) * headers;
}

static void take_off(int from) {
  static uint8_t frame[FRAME];
  struct host *h = hosts[from];
  for (int i = 0; i < 32; i++) {
    int size = (int)read(h->tun, frame, sizeof frame), ip = sizeof(struct virtio_net_hdr);
    if (size <= 0) return;
    if (size < ip + 20 || frame[ip] >> 4 != 4) continue;
    int to = frame[ip + 19] - 1;
    if (to < 0 || to >= count || h->cut || hosts[to]->cut) continue;
    int wire = wire_bytes(frame, size);
    int64_t out = cross(&h->up, now_ns(), wire, h->patience);
    if (out < 0) continue;
    struct packet *p = malloc(sizeof *p + size);
    if (!p) fail("malloc");
    p->to = to, p->size = size, p->wire = wire;
    memcpy(p->bytes, frame, size);
    put(&h->flying, p, out + h->delay + hosts[to]->delay);
  }
}

static struct ring *earliest(int flying) {
  struct ring *best = NULL;
  for (int i = 0; i < count; i++) {
    struct ring *r = flying ? &hosts[i]->flying : &hosts[i]->landing;
    if (r->head == r->tail) continue;
    if (!best || r->slot[r->head % RING]->due < best->slot[best->head % RING]->due) best = r;
  }
  return best;
}

/* Moves what is due; returns when the next thing is, or -1. */
static int64_t advance(void) {
  for (;;) {
    struct ring *air = earliest(1), *ground = earliest(0);
    struct packet *a = air ? air->slot[air->head % RING] : NULL, *g = ground ? ground->slot[ground->head % RING] : NULL;
    int first_air = a && (!g || a->due <= g->due);
    struct packet *p = first_air ? a : g;
    if (!p) return -1;
    if (p->due > now_ns()) return p->due;
    struct host *h = hosts[p->to];
    if (first_air) {
      air->head++;
      put(&h->landing, p, cross(&h->down, p->due, p->wire, h->patience));
    } else {
      ground->head++;
      if (!h->cut && write(h->tun, p->bytes, p->size) < 0 && errno != EIO && errno != EAGAIN) fail("write");
      free(p);
    }
  }
}

static int command(void) {
  static char text[4096];
  int size = (int)read(0, text, sizeof text - 1), host;
  if (size <= 0) return 0;
  text[size] = 0;
  double a, b;
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    if (sscanf(line, "rate %d %lf %lf", &host, &a, &b) == 3 && host >= 0 && host < count) set_rates(hosts[host], a, b);
    if (sscanf(line, "cut %d %lf", &host, &a) == 2 && host >= 0 && host < count) hosts[host]->cut = a != 0;
  }
  return 1;
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc && count < HOSTS; i++) {
    char space[100];
    double up, down, delay, queue;
    if (sscanf(argv[i], "%99[^:]:%lf:%lf:%lf:%lf", space, &up, &down, &delay, &queue) != 5) return 2;
    struct host *h = hosts[count++] = calloc(1, sizeof *h);
    h->tun = open_tun(space);
    set_rates(h, up, down);
    h->delay = (int64_t)(delay * 1e6), h->patience = (int64_t)(queue * 1e6);
  }
  sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 2}); /* a router is never late; without leave: best effort */
  struct pollfd fds[HOSTS + 1] = {{.fd = 0, .events = POLLIN}};
  for (int i = 0; i < count; i++) fds[i + 1] = (struct pollfd){.fd = hosts[i]->tun, .events = POLLIN};
  puts("up");
  fflush(stdout);
  for (;;) {
    int64_t next = advance(), wait = next < 0 ? 1000000000 : next - now_ns();
    nanosleep(&(struct timespec){0, GRAIN_NS}, NULL);
    wait = wait < GRAIN_NS ? 0 : wait - GRAIN_NS;
    struct timespec limit = {wait / 1000000000, wait % 1000000000};
    if (ppoll(fds, count + 1, &limit, NULL) < 0 && errno != EINTR) fail("ppoll");
    if (fds[0].revents && !command()) return 0;
    for (int i = 0; i < count; i++)
      if (fds[i + 1].revents) take_off(i);
  }
}
